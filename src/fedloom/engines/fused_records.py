"""Where a stack's records lie: all on the device, or, where they do not fit there, those of a chunk at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from fedloom.federation.records import Records, Silo, concatenate

RECORDS_SHARE = 0.5  # of the memory that a device has left: weights, moments and noise need some, too


class RecordTable(Protocol):
    """Records of silos on a device, as stored."""

    @property
    def records(self) -> Records:
        """All of them end to end; rows of a batch are numbers into this."""
        ...

    def reserve(self, silos: int) -> None:
        """Make room for so many silos at once."""
        ...

    def load(self, silos: Sequence[Silo]) -> list[int]:
        """See to it that the records of these silos are there; says where each silo's begin."""
        ...

    @property
    def places(self) -> Mapping[Silo, int]:
        """Where the records of each silo begin that lies there for good."""
        ...


class WholeTable:
    """The records of all silos, for good."""

    def __init__(self, silos: Sequence[Silo], device: torch.device) -> None:
        ends = itertools.accumulate(map(len, silos), initial=0)
        self.places = dict(zip(silos, ends, strict=False))
        self.records = concatenate([silo.train for silo in silos]).to(device)

    def reserve(self, silos: int) -> None:
        """There is room for everybody."""

    def load(self, silos: Sequence[Silo]) -> list[int]:
        """Nothing need be sent; says where each silo's records begin."""
        return [self.places[silo] for silo in silos]


class ChunkTable:
    """The records of the silos that train together, sent to the device before they do, always to the same place."""

    def __init__(self, silos: Sequence[Silo], device: torch.device) -> None:
        self._largest_first = sorted(silos, key=len, reverse=True)
        self._device = device
        self._held: dict[Silo, int] = {}
        self.places: Mapping[Silo, int] = {}  # records come and go
        self.records = self._empty(0)

    def _empty(self, rows: int) -> Records:
        like = self._largest_first[0].like
        return like.holding(
            {n: torch.zeros(rows, *c.shape[1:], dtype=c.dtype, device=self._device) for n, c in like.columns().items()}
        )

    def reserve(self, silos: int) -> None:
        """Room for the largest so many."""
        rows = sum(map(len, self._largest_first[:silos]))
        if rows != len(self.records):
            self._held, self.records = {}, self._empty(0)  # given back before more is taken
            self.records = self._empty(rows)

    def load(self, silos: Sequence[Silo]) -> list[int]:
        """Send them, unless they are still there."""
        wanted = list(dict.fromkeys(silos))
        if wanted != list(self._held):
            self._held = dict(zip(wanted, itertools.accumulate(map(len, wanted), initial=0), strict=False))
            places = self.records.columns()  # written in place: a recorded program goes on reading these addresses
            for silo, offset in self._held.items():
                for name, column in silo.train.columns().items():
                    places[name][offset : offset + len(silo)] = column
        return [self._held[silo] for silo in silos]


def refill(table: RecordTable, silo: Silo, records: Records) -> bool:
    """Put other records in the place of a silo's, if they fit there: what was recorded reads them from then on."""
    first = table.places.get(silo)
    if first is None or len(records) != len(silo):
        return False
    theirs = records.columns()
    for name, place in table.records.columns().items():
        place[first : first + len(silo)] = theirs[name]
    return True


def room_on(device: torch.device) -> float:
    """How many bytes of records a device takes."""
    return RECORDS_SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")


def size_of(silos: Iterable[Silo]) -> int:
    """How many bytes the records of silos take."""
    return sum(column.nbytes for silo in silos for column in silo.train.columns().values())
