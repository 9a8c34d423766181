"""The charter: what everybody in a federation knows of it before any record is looked at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedloom.errors import ConfigError, DataError, unknown
from fedloom.settings import parse

if TYPE_CHECKING:
    from fedloom.federation.records import Dataset, Federation, Records

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class Charter:
    """A federation's name and address, its silos with their groups, and what one record is like."""

    name: str
    address: str = ""  # where silos reach the server, host:port; in a federation of others that is their matter
    silos: dict[str, str]  # name -> group; their order numbers both
    shape: tuple[int, ...]  # of one record
    modality: str = ""  # what a record is; empty: an image or a vector, as its shape says
    classes: tuple[str, ...] = ()  # names of the labels; empty: records have none
    # The most records that each silo will ever claim, which are its weight; empty: all silos weigh the same.
    records: dict[str, int] = field(default_factory=dict)
    wire: Literal["direct", "flower", "nvflare"] = "direct"  # by which silos and server speak

    def __post_init__(self) -> None:
        if not self.silos:
            raise ConfigError("silos is empty; a federation needs at least one")
        for silo in (*self.silos, self.name):
            if not NAME.fullmatch(silo) or silo == "server":
                raise ConfigError(
                    f"'{silo}' cannot be the name of a silo or federation: use small letters, digits, '.', '_' and "
                    "'-', and not 'server'"
                )
        host, _, port = self.address.rpartition(":")
        if self.wire == "direct" and (not host or not port.isdigit() or not 0 < int(port) < 65536):
            raise ConfigError(f"address = '{self.address}' must be host:port, such as fed.example.org:8443")
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"shape = {list(self.shape)} must be the size of one record, such as 1,28,28")
        self._check_records()

    def _check_records(self) -> None:
        """All silos are declared, or none: what one claims without a bound would outweigh what the others may."""
        for silo, count in self.records.items():
            if silo not in self.silos:
                raise ConfigError("records: " + unknown("silo", silo, self.silos))
            if count < 1:
                raise ConfigError(f"records.{silo} = {count} must be at least 1")
        missing = [silo for silo in self.silos if silo not in self.records]
        if self.records and missing:
            raise ConfigError(f"records declares nothing for silo '{missing[0]}'; declare all silos or none")

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> Charter:
        """The charter that a table of TOML declares."""
        missing = sorted({"name", "silos", "shape"} - set(mapping))
        if missing:
            raise ConfigError(f"a charter needs '{missing[0]}'")
        return parse(cls, {"wire": "flower", **mapping})  # which a charter of an earlier version does not say

    def require_direct(self, path: Path) -> None:
        """Complain of what belongs to a federation of others, or to an earlier version, which started Flower itself."""
        if self.wire != "direct":
            raise ConfigError(
                f"{path} names the wire '{self.wire}', whose servers fedloom does not run any more: found the "
                "federation anew with 'fedloom federation init', or run experiments in a federation that others run "
                "('fedloom federation app' for Flower, 'job' for NVFlare)"
            )

    def to_mapping(self) -> dict[str, Any]:
        """The charter as a table of TOML, which :meth:`of` reads back."""
        return {
            "name": self.name,
            "address": self.address,
            "shape": list(self.shape),
            "modality": self.modality,
            "classes": list(self.classes),
            "wire": self.wire,
            "silos": dict(self.silos),
            "records": dict(self.records),
        }

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self.address.rpartition(":")[2])

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """In the order in which the silos name them, which numbers them."""
        return tuple(dict.fromkeys(self.silos.values()))

    def index(self, silo: str) -> int:
        """The silo's number, in the order of the charter."""
        if silo not in self.silos:
            raise ConfigError(unknown("silo", silo, self.silos))
        return list(self.silos).index(silo)

    def at_the_server(self, public: Dataset | None = None) -> Federation:
        """The federation without any silo's records; ``public`` gives held-out ones that belong to nobody in it."""
        from fedloom.federation.records import Federation
        from fedloom.federation.remote import RemoteSilo

        silos = tuple(
            RemoteSilo.of(name, (self.groups.index(group),), self.shape, self.modality)
            for name, group in self.silos.items()
        )
        test = silos[0].train if public is None else self._public(public)
        return Federation(self.name, silos, test, self.groups, self.classes)

    def at_a_silo(self, silo: str, own: Dataset) -> Federation:
        """The federation with one silo's records."""
        from fedloom.federation.records import Silo

        if self.records and len(own.train) > self.records[silo]:
            raise DataError(
                f"'{own.name}' holds {len(own.train)} records, the charter declares at most {self.records[silo]} for "
                f"silo '{silo}'"
            )
        federation, group = self.at_the_server(), self.groups.index(self.silos[silo])
        silos = list(federation.silos)
        silos[self.index(silo)] = Silo(silo, self._records(own, own.train, group))
        return replace(federation, silos=tuple(silos), test=self._records(own, own.test, group))

    def _records(self, source: Dataset, records: Records, group: int) -> Records:
        """Records with the charter's numbers for classes and the group; further attributes have no common meaning."""
        import torch

        from fedloom.modalities.base import modality_of

        if records.modality != (wanted := modality_of(self.modality, self.shape)):
            raise DataError(f"'{source.name}' holds {records.modality.plural}, the charter says {wanted.plural}")
        if records.shape != self.shape:
            raise DataError(f"'{source.name}' holds records of shape {records.shape}, the charter says {self.shape}")
        foreign = sorted(set(source.classes) - set(self.classes)) if self.classes else []
        if foreign:
            raise DataError(f"'{source.name}' has the class '{foreign[0]}', which the charter does not name")
        numbers = [self.classes.index(name) for name in source.classes] if self.classes else [-1] * len(source.classes)
        y = torch.tensor([*numbers, -1])[records.y]  # the last stands for no label, which is -1
        return replace(records, y=y, group=torch.full((len(records),), group), attributes=None)

    def _public(self, public: Dataset) -> Records:
        """A public set's held-out records, which say of which group each is."""
        import torch

        for name in public.groups:
            if name not in self.groups:
                raise DataError(f"'{public.name}': " + unknown("group", name, self.groups))
        group = torch.tensor([self.groups.index(name) for name in public.groups])[public.test.group]
        return replace(self._records(public, public.test, 0), group=group)


def load_records(path: Path, source: str = "", modality: str = "") -> Dataset:
    """A silo's records: those of a source; else a table, if the charter has its schema; an .npz file; or images.

    Images lie in a folder, or in one folder for each class.
    """
    from fedloom.federation.picture_folders import load_own_images
    from fedloom.federation.sources import SOURCES
    from fedloom.federation.tables import READERS, load_own_table

    if not source and path.suffix in READERS:
        return load_own_table(path, modality)
    if not source and path.suffix != ".npz":
        return load_own_images(str(path))
    return SOURCES.get(source or "npz", "--source").load(str(path))
