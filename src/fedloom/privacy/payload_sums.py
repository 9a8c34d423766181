"""What a silo computes from its own records to send beside its blocks, with noise that is right by construction.

Neighbouring data sets differ in one record (or all records of one subject). A sum to which each of them adds at most
``bound`` in the Euclidean norm, over all tensors together, is moved by at most that when one is added or removed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fedloom.errors import ConfigError, FedloomError
from fedloom.federation.records import Batch, Records, batch_of
from fedloom.outline import in_outline
from fedloom.privacy.accounting import Event, Gaussian, NoGuarantee
from fedloom.privacy.clipping import clip_factors
from fedloom.privacy.grids import Grid
from fedloom.privacy.noise import NoiseKey, Randomness
from fedloom.streams import Streams

log = logging.getLogger(__name__)

Tensors = dict[str, Tensor]
# Records looked at together: few, because each may contribute a whole matrix, and what stays in the cache is faster.
ROWS, TRIED_ROWS = 16, 4
VARIANCE = "variance"  # of the noise in counts that a silo sends, in squares of what one record adds
UNLIKELY = 8.0  # standard normal noise is longer than sqrt(size) + t with a probability below exp(-t^2 / 2)


@dataclass(frozen=True, eq=False)
class SumNoise:
    """How a sum is made private."""

    __repr__ = in_outline

    multiplier: float  # standard deviation, in bounds on one unit's contribution
    unit: Tensor | None  # for each record the number of its unit, from 0; None: each is one
    randomness: Randomness
    shapes: Mapping[str, tuple[int, ...]] | None = None  # given: records that fail contribute nothing, of these shapes
    grid: Grid | None = None  # given: whole steps of it are sent, with a share of noise in whole steps


@dataclass(frozen=True, eq=False)
class Query:
    """What a statistic is computed from, once."""

    records: Records
    model: nn.Module  # as it is after the round's training; where silos share noise, as it came down
    streams: Streams
    noise_key: NoiseKey
    noise: SumNoise | None  # None: the value is sent as it is


class Statistic(Protocol):
    """A function of a silo's records, and of its model."""

    @property
    def bound(self) -> float:
        """The Euclidean norm that no unit's contribution passes; infinite where none is known."""
        ...

    @property
    def problem(self) -> str:
        """Why no noise makes it private; empty where noise does."""
        ...

    def check(self, records: Records, model: nn.Module) -> None:
        """Refuse, on a few records, what would not be private after all."""
        ...

    def value(self, query: Query) -> Tensors:
        """The tensors that a silo sends, before any noise."""
        ...


@dataclass(frozen=True)
class BoundedSum:
    """The sum of what the records contribute.

    ``contribution`` gives tensors with one row for each record of a batch, and a record's row must depend on the model
    and on that record alone. Without a mechanism the rows are summed as they are.
    """

    contribution: Callable[[nn.Module, Batch], Mapping[str, Tensor]]
    bound: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise ConfigError(f"the bound of a contribution is {self.bound}; it must be greater than 0 and finite")

    @property
    def problem(self) -> str:
        """Nothing: noise covers what is sent."""
        return ""

    def check(self, records: Records, model: nn.Module) -> None:
        """A record's row may not depend on the others of its batch."""
        few = torch.arange(min(TRIED_ROWS, len(records)))
        with torch.no_grad():
            together = self.contribution(model, batch_of(records, few))
            alone = [self.contribution(model, batch_of(records, row)) for row in torch.split(few, 1)]
        for name, rows in together.items():
            if not torch.allclose(rows, torch.cat([each[name] for each in alone]), rtol=1e-4, atol=1e-5):
                raise ConfigError(f"what a record contributes to '{name}' depends on the other records of its batch")

    def value(self, query: Query) -> Tensors:
        """The plain sum, or the clipped sum with normal noise; float32, added up in float64."""
        records, model, noise = query.records, query.model, query.noise
        if noise is None:
            return _as_sent(self._sum(records, model, None, math.inf, None))
        return noised(self._sum(records, model, noise.unit, self.bound, noise.shapes), query, self.bound)

    def clipped(self, records: Records, model: nn.Module, unit: Tensor | None) -> Tensors:
        """The sum before noise, float64: a unit's contributions are added up, then clipped to ``bound``."""
        return self._sum(records, model, unit, self.bound, None)

    def _contributed(self, model: nn.Module, records: Records, shapes: Mapping[str, tuple[int, ...]] | None) -> Tensors:
        """What records contribute; those that fail contribute nothing, where ``shapes`` say of what.

        That something failed would tell whoever chose the weights that such a record is there.
        """
        everyone = torch.arange(len(records))
        try:
            return dict(self.contribution(model, batch_of(records, everyone)))
        except Exception:
            if shapes is None:
                raise
            log.exception("what some records contribute cannot be computed")
        if len(records) == 1:
            return {name: torch.zeros(1, *shape) for name, shape in shapes.items()}
        alone = [self._contributed(model, records.take(row), shapes) for row in torch.split(everyone, 1)]
        return {name: torch.cat([each[name] for each in alone]) for name in shapes}

    @torch.no_grad()
    def _sum(
        self,
        records: Records,
        model: nn.Module,
        unit: Tensor | None,
        bound: float,
        shapes: Mapping[str, tuple[int, ...]] | None,
    ) -> Tensors:
        totals: Tensors = {}
        for index, owner in _passes(len(records), unit):
            rows = self._contributed(model, records.take(index), shapes)
            flat = torch.cat([tensor.reshape(len(index), -1) for tensor in rows.values()], dim=1)
            flat = flat.new_zeros(int(owner.max()) + 1, flat.shape[1]).index_add(0, owner, flat)
            if math.isfinite(bound):
                norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
                factors = clip_factors(norms, torch.tensor(bound, dtype=norms.dtype), torch.ones_like(norms))
                flat = torch.where(factors.unsqueeze(1) > 0, flat * factors.unsqueeze(1), 0.0)
            total = flat.sum(dim=0, dtype=torch.float64)
            parts = torch.split(total, [math.prod(tensor.shape[1:]) for tensor in rows.values()])
            for (name, tensor), part in zip(rows.items(), parts, strict=True):
                totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + part.reshape(tensor.shape[1:])
        return totals


@dataclass(frozen=True)
class Tally:
    """Counts of what records are, made of all of them at once; exact, and private by what a single one can count for.

    A record adds a vector of Euclidean norm ``of_one`` and whole numbers to the counts, whatever it is. Of a subject
    the first ``rows`` records count, so that no other subject decides which they are.
    """

    count: Callable[[nn.Module, Records], Tensors]  # the sum over these records of what each adds, whole numbers
    of_one: float
    rows: int = 1

    @property
    def bound(self) -> float:
        """All records of a unit that count may be alike."""
        return self.rows * self.of_one

    @property
    def problem(self) -> str:
        """Nothing: noise covers what is sent."""
        return ""

    def check(self, records: Records, model: nn.Module) -> None:
        """Counts of some records are the sum of the counts of each, and none adds more than it may."""
        few = records.take(torch.arange(min(TRIED_ROWS, len(records))))
        together = self.count(model, few)
        alone = [self.count(model, few.take(row)) for row in torch.split(torch.arange(len(few)), 1)]
        for name, total in together.items():
            if not torch.equal(total, torch.stack([each[name] for each in alone]).sum(dim=0)):
                raise ConfigError(f"what a record adds to '{name}' depends on other records")
        for each in alone:
            norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in each.values()))
            if norm > self.of_one * (1 + 1e-9):
                raise ConfigError(f"a record adds {norm:g} to the counts, and {self.of_one:g} is stated")

    def value(self, query: Query) -> Tensors:
        """The counts, with normal noise under a mechanism; float32."""
        noise = query.noise
        if noise is None:
            return _as_sent(self.count(query.model, query.records))
        counted = query.records if noise.unit is None else query.records.take(first_rows(noise.unit, self.rows))
        return noised(self.count(query.model, counted), query, self.bound)


def first_rows(unit: Tensor, most: int) -> Tensor:
    """The numbers of each unit's first records, at most so many of one."""
    order = torch.argsort(unit, stable=True)
    starts = torch.cumsum(torch.bincount(unit), 0) - torch.bincount(unit)
    rank = torch.arange(len(unit)) - starts[unit[order]]
    return order[rank < most].sort().values


def noised(total: Tensors, query: Query, bound: float) -> Tensors:
    """A sum that one unit moves by at most ``bound``, with normal noise; added in float64, sent in float32."""
    assert query.noise is not None
    if query.noise.grid is not None:
        unit, words = query.noise.unit, query.noise.randomness.words(query.noise_key)
        units = len(query.records) if unit is None else int(unit.max()) + 1
        return query.noise.grid.released(total, units, words)
    sizes = [tensor.numel() for tensor in total.values()]
    flat = query.noise.randomness.normal(sum(sizes), query.noise_key).to(torch.float64) * query.noise.multiplier * bound
    parts = zip(total.items(), torch.split(flat, sizes), strict=True)
    return _as_sent({name: tensor + part.reshape(tensor.shape) for (name, tensor), part in parts})


@dataclass(frozen=True)
class WithVariance:
    """Counts that are sent with how noisy they are, which depends on no record and adds up over silos."""

    statistic: Tally

    @property
    def bound(self) -> float:
        """That of the counts."""
        return self.statistic.bound

    @property
    def problem(self) -> str:
        """That of the counts."""
        return self.statistic.problem

    def check(self, records: Records, model: nn.Module) -> None:
        """What the counts are checked for."""
        self.statistic.check(records, model)

    def value(self, query: Query) -> Tensors:
        """The counts, and the variance of their noise."""
        variance = 0.0 if query.noise is None else (query.noise.multiplier * self.statistic.rows) ** 2
        return {**self.statistic.value(query), VARIANCE: torch.tensor([variance])}


@dataclass(frozen=True)
class Unbounded:
    """Any other function of the records; it is sent as it is, and no epsilon covers it."""

    compute: Callable[[Query], Tensors]
    problem: str  # why there is no guarantee
    bound: float = math.inf  # it may be anything

    def check(self, records: Records, model: nn.Module) -> None:
        """Nothing is promised of it."""

    def value(self, query: Query) -> Tensors:
        """The function's value, without noise: none would help."""
        return self.compute(query)


def largest(statistic: Statistic, units: int, multiplier: float, size: int) -> float:
    """The Euclidean norm that a private value of ``size`` numbers does not pass.

    Every unit adds the bound, and the noise is longer than this once in 10^13 times or less.
    """
    return statistic.bound * (units + multiplier * (math.sqrt(size) + UNLIKELY))


def cost_of(statistic: Statistic, noise_multiplier: float) -> Event:
    """What sending it once costs."""
    return NoGuarantee(statistic.problem) if statistic.problem else Gaussian(noise_multiplier)


def _passes(records: int, unit: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """All records in passes of about ``ROWS``, and for each the number of its unit in its pass; no unit is divided."""
    if unit is None:
        for index in torch.split(torch.arange(records), ROWS):
            yield index, torch.arange(len(index))
        return
    if len(unit) != records:
        raise FedloomError(f"there are {records} records, but {len(unit)} say whose they are")
    order = torch.argsort(unit, stable=True)
    part: list[Tensor] = []
    rows = 0
    for owned in torch.split(order, torch.bincount(unit).tolist()):
        if part and rows + len(owned) > ROWS:
            yield _numbered(part)
            part, rows = [], 0
        part.append(owned)
        rows += len(owned)
    yield _numbered(part)


def _numbered(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([len(part) for part in parts])
    return torch.cat(parts), torch.repeat_interleave(torch.arange(len(parts)), sizes)


def _as_sent(tensors: Tensors) -> Tensors:
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
