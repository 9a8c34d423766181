"""Who holds what: records, silos, federations."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.config import DataConfig
from fedloom.errors import DataError
from fedloom.modalities.base import Modality, modality_of
from fedloom.outline import in_outline
from fedloom.shown import Shown

UNLABELLED = -1


@dataclass(frozen=True, eq=False)
class Records:
    """A table of examples; ``x`` as their modality stores it."""

    __repr__ = in_outline

    x: Tensor  # (n, *shape)
    y: Tensor  # (n,) int64 class, UNLABELLED where unknown
    group: Tensor  # (n,) int64 index into the federation's groups
    subject: Tensor | None = None  # (n,) int64: whose record it is, for subject-level privacy
    attributes: Tensor | None = None  # (n, a) float32: further conditions
    home: Tensor | None = None  # (n,) int64: of held-out records, the number of the silo that held each out, or -1
    kind: str = ""  # the name of their modality; "": that which their shape speaks for

    def __post_init__(self) -> None:
        for name in ("y", "group", "subject", "attributes", "home"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.x):
                raise DataError(f"records have {len(self.x)} rows of x but {len(column)} of {name}")

    def __len__(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.x.shape[1:])

    @cached_property
    def modality(self) -> Modality:
        """The modality that the records are of."""
        return modality_of(self.kind, self.shape)

    @property
    def values(self) -> Tensor:
        """``x`` as models see it."""
        return self.modality.decode(self.x)

    def columns(self) -> dict[str, Tensor]:
        """By name, without those that are missing."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: column for name, column in found.items() if isinstance(column, Tensor)}

    def holding(self, columns: Mapping[str, Tensor]) -> Records:
        """Other records of the same kind."""
        return Records(kind=self.kind, **columns)

    def take(self, index: Tensor) -> Records:
        """The rows at ``index``, in that order."""
        return self.holding({name: column[index] for name, column in self.columns().items()})

    def of_group(self, group: int) -> Records:
        """The rows of one group."""
        return self.take(torch.nonzero(self.group == group).flatten())

    def to(self, device: torch.device | str) -> Records:
        """The same table on another device."""
        return self.holding({name: column.to(device) for name, column in self.columns().items()})


def concatenate(tables: Sequence[Records]) -> Records:
    """Stack tables of one modality; a column that one of them lacks is dropped."""
    for table in tables:
        if table.modality != tables[0].modality:
            raise DataError(f"{tables[0].modality.plural} and {table.modality.plural} do not go into one table")
    subjects = [t.subject for t in tables if t.subject is not None]
    attributes = [t.attributes for t in tables if t.attributes is not None]
    return Records(
        x=torch.cat([t.x for t in tables]),
        y=torch.cat([t.y for t in tables]),
        group=torch.cat([t.group for t in tables]),
        subject=torch.cat(subjects) if len(subjects) == len(tables) else None,
        attributes=torch.cat(attributes) if len(attributes) == len(tables) else None,
        kind=tables[0].kind,
    )


@dataclass(frozen=True, eq=False)
class Batch:
    """What a phase sees of the records: ``mask`` is 0 where a row is padding."""

    __repr__ = in_outline

    x: Tensor
    y: Tensor
    group: Tensor
    mask: Tensor
    subject: Tensor | None = None
    attributes: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The same rows on another device."""
        return Batch(**{name: column.to(device) for name, column in vars(self).items() if column is not None})

    def rows(self, rows: slice) -> Batch:
        """Some of the rows."""
        return Batch(**{name: column[rows] for name, column in vars(self).items() if column is not None})


def batch_of(records: Records, index: Tensor, mask: Tensor | None = None) -> Batch:
    """Gather a batch, converted to what models see; without a mask every row counts."""
    rows = records.take(index)
    return Batch(
        x=rows.values,
        y=rows.y,
        group=rows.group,
        mask=torch.ones(len(rows), device=rows.x.device) if mask is None else mask,
        subject=rows.subject,
        attributes=rows.attributes,
    )


@dataclass(frozen=True, eq=False)
class Dataset:
    """Pooled data before anybody owns it: what a source gives and a partition divides."""

    __repr__ = in_outline

    name: str
    train: Records
    test: Records
    groups: tuple[str, ...]  # names of the domains
    classes: tuple[str, ...] = ()  # names of the labels; empty when unlabelled
    owners: tuple[str, ...] = ()  # names of natural silos, where the source knows them
    owner: Tensor | None = None  # (n,) int64 index into owners for each training record
    attributes: tuple[str, ...] = ()  # "name=value" for each column of the records' attributes


@dataclass(frozen=True, eq=False)
class Silo:
    """One organisation and the records it may not hand out."""

    __repr__ = in_outline

    name: str
    train: Records
    validation: Records | None = None  # never trained on; for choices that the silo makes at home
    named: bool = True  # whether its groups are part of its data; those that were found are not
    is_remote: ClassVar[bool] = False  # whether its records are somewhere else

    def __len__(self) -> int:
        return len(self.train)

    @property
    def like(self) -> Records:
        """Records of the kind that it holds, for whoever asks for no more than that."""
        return self.train

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The groups its records belong to: one in a federation by groups, all in the centralised layout."""
        return tuple(torch.unique(self.train.group).tolist())

    @cached_property
    def digest(self) -> str:
        """A hash over its name and records: what a privacy budget is bound to."""
        found = hashlib.sha256()
        self.feed(found)
        return found.hexdigest()

    def feed(self, found: hashlib._Hash) -> None:
        """Add its name and records to a hash."""
        found.update(f"{self.name}/{self.train.x.dtype}/{tuple(self.train.x.shape)}".encode())
        for table in (self.train, self.validation):
            if table is None:
                continue
            columns = (table.x, table.y, table.group if self.named else None, table.subject, table.attributes)
            for column in (column for column in columns if column is not None):
                found.update(column.cpu().contiguous().numpy().tobytes())


@dataclass(frozen=True, eq=False)
class Canaries:
    """Records that were put among a silo's by a coin each; those that are in come last there."""

    __repr__ = in_outline

    silo: str
    records: Records
    included: Tensor  # (n,) bool

    @property
    def trained(self) -> Records:
        """The canaries that are among the training records."""
        return self.records.take(torch.nonzero(self.included).flatten())


@dataclass(frozen=True, eq=False)
class Federation:
    """The silos, the groups they belong to, and the held-out records that everybody is measured on."""

    __repr__ = in_outline

    name: str
    silos: Sequence[Silo]
    test: Records
    groups: tuple[str, ...]
    classes: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()  # "name=value" for each column of the records' attributes
    unseen_outliers: Records | None = None  # like those in the silos where some were put in, but never trained on
    canaries: tuple[Canaries, ...] = ()  # of each silo that has some
    redealt: tuple[str, ...] = ()  # silos that the source names, where others were made of their records
    described: DataConfig | None = None  # the settings that it was built from; None: records in memory, or elsewhere
    on_demand: ClassVar[bool] = False  # whether silos are made when they are drawn

    def __post_init__(self) -> None:
        if not self.silos:
            raise DataError("a federation needs at least one silo")
        names = [silo.name for silo in self.known]
        if len(set(names)) < len(names):
            raise DataError(f"two silos share a name: {', '.join(sorted(names))}")
        if "server" in names:
            raise DataError("no silo may be called 'server': that is the name of the server's own site")
        for silo in self.known:
            if len(silo) == 0 and not silo.is_remote:
                raise DataError(f"silo '{silo.name}' holds no records")
            if silo.train.modality != self.modality:
                raise DataError(
                    f"silo '{silo.name}' holds {silo.train.modality.plural}, the others {self.modality.plural}"
                )
            if silo.train.shape != self.shape:
                raise DataError(
                    f"silo '{silo.name}' holds records of shape {silo.train.shape}, the others {self.shape}"
                )
            for records in (silo.train, *((silo.validation,) if silo.validation is not None else ())):
                if complaint := self.modality.objection(records.x) if len(records) else "":
                    raise DataError(f"silo '{silo.name}' holds {complaint}")
            if max(silo.groups) >= len(self.groups) or min(silo.groups) < 0:
                raise DataError(f"silo '{silo.name}' has records of a group that the federation does not name")
        if len(self.test):
            if self.test.modality != self.modality:
                raise DataError(
                    f"the held-out records are {self.test.modality.plural}, those of the silos {self.modality.plural}"
                )
            if self.test.shape != self.shape:
                raise DataError(f"the held-out records have shape {self.test.shape}, those of the silos {self.shape}")
            if complaint := self.modality.objection(self.test.x):
                raise DataError(f"the held-out records hold {complaint}")

    def __len__(self) -> int:
        return len(self.silos)

    def __str__(self) -> str:
        return str(self._shown())

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        return self._shown()._repr_html_()

    def _shown(self) -> Shown:
        from fedloom.federation.outlook import shown_federation  # which is about this class

        return shown_federation(self)

    @property
    def known(self) -> Sequence[Silo]:
        """The silos that can be looked at before anybody is drawn."""
        return self.silos

    @cached_property
    def alike(self) -> Mapping[tuple[int, ...], Sequence[int]]:
        """The numbers of the silos with records of the same groups, lowest first; the last silo's groups first."""
        found: dict[tuple[int, ...], list[int]] = {}
        for number in reversed(range(len(self))):
            found.setdefault(self.silos[number].groups, []).append(number)
        return {groups: numbers[::-1] for groups, numbers in found.items()}

    def numbers_of(self, names: Collection[str]) -> Mapping[str, int]:
        """The numbers of these silos, by name."""
        numbers = {silo.name: number for number, silo in enumerate(self.silos)}
        return {name: numbers[name] for name in names}

    @property
    def held(self) -> int:
        """How many records silos hold in all."""
        return sum(map(len, self.silos))

    @property
    def training(self) -> Records:
        """The records of all silos: only a simulation has them in one place."""
        return concatenate([silo.train for silo in self.silos])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return self.silos[0].like.shape

    @property
    def modality(self) -> Modality:
        """The modality that the records of all silos are of."""
        return self.silos[0].like.modality

    @property
    def is_remote(self) -> bool:
        """Whether this is a server's view, which holds no silo's records."""
        return all(silo.is_remote for silo in self.known)

    @cached_property
    def digest(self) -> str:
        """A hash over who holds what, to tell whether data changed between a run and its resumption."""
        named = any(silo.named for silo in self.silos)
        found = hashlib.sha256(repr((self.groups if named else (), self.classes)).encode())
        for silo in self.silos:
            silo.feed(found)
        return found.hexdigest()

    def require_labels(self, method: str) -> None:
        """Complain unless every record has one of at least two classes."""
        if len(self.classes) < 2:
            known = f"the class '{self.classes[0]}' alone" if self.classes else "no classes"
            raise DataError(f"method '{method}' learns classes, and the records of '{self.name}' have {known}")
        for silo in self.known:
            if bool((silo.train.y < 0).any()):
                missing = int((silo.train.y < 0).sum())
                raise DataError(
                    f"method '{method}' learns classes, but {missing} of the {len(silo)} records of silo "
                    f"'{silo.name}' have no label"
                )

    def centralised(self) -> Federation:
        """The same records pooled in one silo: the layout that upper bounds are measured in."""
        pooled = self.training
        aside = [silo.validation for silo in self.silos if silo.validation is not None]
        silo = Silo("centralised", pooled, concatenate(aside) if aside else None)
        return replace(self, silos=(silo,), test=replace(self.test, home=None))
