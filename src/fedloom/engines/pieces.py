"""A round in pieces, each of which one rank carries out: on how many ranks, changes nothing of what comes of them.

Which pieces there are follows from who takes part in the round, never from the number of ranks; what came of them is
put together in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fedloom.engines.base import Engine, FederationState, Job, Result, RoundReport
from fedloom.outline import in_outline
from fedloom.sharing.plan import BlockKey, Tensors

Sum = tuple[BlockKey, float, Tensors]  # of an owner's copies: their weight together, and the weighted sums


@dataclass(frozen=True)
class RoundPiece:
    """Silos that only train together, and how many steps they take in all."""

    silos: tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class RoundPart:
    """What came of a piece."""

    __repr__ = in_outline

    piece: int
    results: Sequence[Result]
    sums: Sequence[Sum] = ()  # where an engine sums blocks; they are then missing in the updates


class Divisible(Engine, Protocol):
    """An engine that can carry out some pieces of a round; all of them, and their end, make the round."""

    def pieces(self, job: Job) -> list[RoundPiece]:
        """Those of a round, in the order in which their parts are put together."""
        ...

    def carry_out(self, job: Job, pieces: Sequence[int]) -> list[RoundPart]:
        """The silos' half of a round for these pieces, of which ``job.on_silo`` hears."""
        ...

    def concluded(self, job: Job, parts: Sequence[RoundPart]) -> tuple[FederationState, RoundReport]:
        """The server's half, given the parts of all pieces in their order."""
        ...


def shares_of(pieces: Sequence[RoundPiece], ranks: int) -> list[list[int]]:
    """Which pieces each rank carries out: the longest first, each to whoever has fewest steps so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    steps = [0] * ranks
    for number in sorted(range(len(pieces)), key=lambda number: -pieces[number].steps):
        rank = steps.index(min(steps))
        shares[rank].append(number)
        steps[rank] += pieces[number].steps
    return [sorted(share) for share in shares]
