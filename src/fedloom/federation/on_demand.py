"""Silos whose records are made when the silo is drawn: of a million of them only those at work are in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.config import Config, DataConfig
from fedloom.errors import ConfigError, DataError
from fedloom.federation.records import Federation, Records, Silo, concatenate
from fedloom.outline import in_outline

PREFIX = "silo-"
MOST_KEPT = 256  # silos whose records stay in memory, the latest: more than train at once


class SilosOnDemand(Sequence[Silo]):
    """Silos by number, from "silo-0" on; ``records`` makes the records of one, the same ones whenever it is asked."""

    def __init__(
        self,
        records: Callable[[int], Records],
        sizes: Sequence[int] | NDArray[np.int64],
        groups: Mapping[tuple[int, ...], range],
        recipe: str,
    ) -> None:
        """How many records each silo has, which silos are of which groups, and ``recipe``, of what records are made.

        Two federations of one recipe are taken for the same: it stands for the records that nobody can look at.
        """
        parts = sorted(groups.values(), key=lambda part: part.start)
        starts, stops = [part.start for part in parts], [part.stop for part in parts]
        if [*starts, len(sizes)] != [0, *stops] or any(part.step != 1 for part in parts):
            raise DataError(f"groups must name each of the {len(sizes)} silos once, in ranges without a gap")
        self.sizes, self.groups, self.recipe = np.asarray(sizes, dtype=np.int64), groups, recipe
        self.records_of = lru_cache(MOST_KEPT)(self._made)
        self._records = records

    def __reduce__(self) -> tuple[object, ...]:
        """A worker process makes records itself."""
        return type(self), (self._records, self.sizes, self.groups, self.recipe)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, number: int) -> Silo: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Silo]: ...

    def __getitem__(self, number: int | slice) -> Silo | Sequence[Silo]:
        places = range(len(self))[number]  # complains of numbers that are none
        return SiloOnDemand(self, places) if isinstance(places, int) else [SiloOnDemand(self, each) for each in places]

    def __iter__(self) -> Iterator[Silo]:
        """Whoever goes through all of them would make them all."""
        raise DataError(
            f"this looks at the records of every silo, and those of these {len(self):,} are made when a silo is drawn"
        )

    def groups_of(self, number: int) -> tuple[int, ...]:
        """The groups that a silo's records are of."""
        return next(groups for groups, part in self.groups.items() if number in part)

    @cached_property
    def like(self) -> Records:
        """A silo's records, of the kind that all are of."""
        return self._made(0)

    def _made(self, number: int) -> Records:
        made = self._records(number)
        expected, groups = self.sizes[number], tuple(torch.unique(made.group).tolist())
        if len(made) != expected or groups != self.groups_of(number):
            raise DataError(
                f"silo '{PREFIX}{number}' was made with {len(made)} records of the groups {groups}; {expected} of the "
                f"groups {self.groups_of(number)} were declared"
            )
        if number and (made.shape != self.like.shape or made.modality != self.like.modality):
            raise DataError(
                f"silo '{PREFIX}{number}' was made with {made.modality.plural} of shape {made.shape}, '{PREFIX}0' "
                f"with {self.like.modality.plural} of shape {self.like.shape}"
            )
        if complaint := made.modality.objection(made.x):
            raise DataError(f"silo '{PREFIX}{number}' holds {complaint}")
        return made


class SiloOnDemand(Silo):
    """One of them; it is made as often as somebody asks, and holds nothing."""

    def __init__(self, source: SilosOnDemand, number: int) -> None:
        """The silo of this number."""
        vars(self).update(name=f"{PREFIX}{number}", validation=None, named=True, _source=source, _number=number)

    _source: SilosOnDemand
    _number: int

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SiloOnDemand):
            return NotImplemented
        return self._number == other._number and self._source is other._source

    def __hash__(self) -> int:
        return hash((id(self._source), self._number))

    def __len__(self) -> int:
        return int(self._source.sizes[self._number])

    @property
    def train(self) -> Records:
        """Its records, made now or lately."""
        return self._source.records_of(self._number)

    @property
    def like(self) -> Records:
        """Records of the kind that it holds."""
        return self._source.like

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The groups that were declared."""
        return self._source.groups_of(self._number)


@dataclass(frozen=True, eq=False)
class FederationOnDemand(Federation):
    """A federation of such silos: whoever would look at all of them looks at the first of each kind."""

    __repr__ = in_outline

    silos: SilosOnDemand
    pool: Records | None = None  # what silos' records are drawn from, and metrics take for all training records
    on_demand: ClassVar[bool] = True

    @cached_property
    def known(self) -> Sequence[Silo]:
        """The first silo of each kind."""
        return [self.silos[numbers[0]] for numbers in self.alike.values()]

    @property
    def alike(self) -> Mapping[tuple[int, ...], Sequence[int]]:
        """The numbers of the silos with records of the same groups."""
        return self.silos.groups

    def numbers_of(self, names: Collection[str]) -> Mapping[str, int]:
        """The numbers of these silos, by name."""
        return {name: int(name.removeprefix(PREFIX)) for name in names}

    @property
    def held(self) -> int:
        """How many records silos would have in all."""
        return int(self.silos.sizes.sum())

    @property
    def training(self) -> Records:
        """What silos' records are drawn from; where nobody said, the first silo of each kind stands for it."""
        return concatenate([silo.train for silo in self.known]) if self.pool is None else self.pool

    @cached_property
    def digest(self) -> str:
        """A hash over the recipe, the sizes, and what can be looked at."""
        silos = self.silos
        found = hashlib.sha256(repr((self.groups, self.classes, silos.recipe, list(silos.groups.items()))).encode())
        found.update(silos.sizes.tobytes())
        for silo in self.known:
            silo.feed(found)
        return found.hexdigest()


def check_data(data: DataConfig) -> None:
    """Refuse what would have to make every silo."""
    usual = DataConfig()
    for name in ("layout", "validation", "outliers"):
        _refuse(f"data.{name}", getattr(data, name), getattr(usual, name))
    if data.groups in ("permuted", "discover"):
        _refuse("data.groups", data.groups, usual.groups)


def check_config(config: Config) -> None:
    """The same of a whole experiment; an account of every silo's records would be one of records not yet made."""
    check_data(config.data)
    _refuse("model.silos", config.model.silos, {})
    _refuse("audit.canaries", config.audit.canaries, 0)
    _refuse("privacy.mechanism", config.privacy.mechanism, "none")


def _refuse(name: str, value: object, usual: object) -> None:
    if value != usual:
        shown = repr(value) if isinstance(value, str | int | float) else "..."
        raise ConfigError(
            f"{name} = {shown} is for silos that are all there before the run, and these are made when they are drawn"
        )
