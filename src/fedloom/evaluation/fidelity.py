"""How near samples of tables are to rows that nobody may see: by noisy counts that their silos released for it.

A count of a pair of levels differs between rows and samples by d, and d with noise of a known variance is seen. Its
absolute values would be those of the noise alone. So the d of all cells are taken to come from a mixture of normal
distributions around 0 of several widths, fitted by expectation maximisation, and what is reported is the mean of the
absolute d given what was seen: adaptive shrinkage, as in Stephens, "False discovery rates: a new deal", Biostatistics,
2017. The narrowest is what two draws of the same people differ by, and where noise hides everything, only it is left:
how much could be hidden is reported beside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import FEW, Metric, Need, Reading, Values
from fedloom.evaluation.needs import SAMPLES
from fedloom.evaluation.table_rows import TABLE
from fedloom.federation.records import Records
from fedloom.methods.fidelity import COUNTS, FIDELITY, NOISE
from fedloom.methods.pair_counts import PairCounts
from fedloom.modalities.schema import Schema
from fedloom.modalities.table import schema_of
from fedloom.models.product_mixture import own_column, record_count
from fedloom.outline import in_outline
from fedloom.runs.metrics import metric_key

WIDTHS = 14  # of each family, from its narrowest to one that explains the largest difference
PRIOR = 40.0  # cells, for the narrowest
STEPS = 300  # of the fit
FITTED = 20_000  # cells that the mixture is fitted to, at most
AT_ONCE = 50_000  # cells whose differences are estimated together
FOLDED = math.sqrt(2 / math.pi)  # the mean absolute value of a standard normal number


@dataclass(frozen=True, eq=False)
class Cells:
    """Some counts that differ, by how much as far as is known, and what each is expected to hold."""

    __repr__ = in_outline

    seen: Tensor  # differences with noise
    deviation: Tensor  # of the noise
    expected: Tensor

    def take(self, which: Tensor) -> Cells:
        """Some of them."""
        return Cells(self.seen[which], self.deviation[which], self.expected[which])

    @property
    def hidden(self) -> float:
        """A difference that all cells may have before it shows: as much as the noise's own variance is known by."""
        return float(self.deviation.max()) * math.sqrt(math.sqrt(2 / len(self.seen)))


@dataclass(frozen=True)
class Distance:
    """The mean total variation of sets of columns, and how much of it noise can hide."""

    value: float
    limit: float

    @classmethod
    def of(cls, cells: Cells, total: float, sets: int) -> Distance:
        """From the cells of all sets, of so many records in each."""
        whole = 2 * total * sets
        return cls(float(_differences(cells).sum()) / whole, FOLDED * cells.hidden * len(cells.seen) / whole)


def distances(schema: Schema, counts: Tensor, variance: float, samples: Tensor) -> tuple[Distance, Distance]:
    """Of one and of two columns, from noisy counts of all pairs of levels."""
    pairs, sizes = PairCounts(schema, target_levels=0), schema.sizes
    nobody = torch.zeros(len(samples), dtype=torch.int64)
    (real,) = pairs.matrices(counts.double().unsqueeze(0))
    (drawn,) = pairs.matrices(pairs.count(nn.Identity(), Records(samples, nobody, nobody))["counts"])
    total, deviation = record_count(sizes, real), math.sqrt(variance) * pairs.of_one
    expected, once = drawn * (total / len(samples)), pairs.counted
    seen = real - expected
    two = Cells(seen[once], seen.new_full((pairs.shape[1],), deviation), expected[once])
    one = _single(sizes, seen, deviation, expected)
    return Distance.of(one, total, len(sizes)), Distance.of(two, total, math.comb(len(sizes), 2))


def _single(sizes: tuple[int, ...], seen: Tensor, deviation: float, expected: Tensor) -> Cells:
    """Single levels: each other column's counts add up to the same, the more noisily the more levels it has."""
    others = torch.repeat_interleave(torch.tensor(sizes, dtype=torch.float64), torch.tensor(sizes))
    weights = torch.where(own_column(sizes), 0.0, 1 / others)  # (levels, levels of the other columns)
    sums = (weights / others).sum(dim=1)  # a column's weights, each counted once
    return Cells((weights * seen).sum(dim=1) / sums, deviation / sums.sqrt(), (weights * expected).sum(dim=1) / sums)


def _differences(cells: Cells) -> Tensor:
    """The expected absolute difference of each cell."""
    if not float(cells.deviation.max()):
        return cells.seen.abs()
    families = {1.0: (cells.expected + 1).sqrt(), cells.hidden: torch.ones_like(cells.expected)}
    widths = [_widths(least, float((cells.seen.abs() / family).max())) for least, family in families.items()]
    shares = _fitted(cells.take(torch.arange(0, len(cells.seen), math.ceil(len(cells.seen) / FITTED))), widths)
    parts = torch.split(torch.arange(len(cells.seen)), AT_ONCE)
    return torch.cat([_absolute(cells.take(part), widths, shares) for part in parts])


def _widths(least: float, largest: float) -> Tensor:
    return torch.logspace(math.log10(least), math.log10(max(2 * least, largest)), WIDTHS, dtype=torch.float64)


def _variances(cells: Cells, widths: list[Tensor]) -> Tensor:
    """(cells, components): of the difference alone; of the first family they go with what a cell is to hold."""
    chance, alike = (width.square() for width in widths)
    rows = cells.expected.unsqueeze(1) + 1
    return torch.cat([chance * rows, alike.expand(len(rows), -1)], dim=1)


def _likelihoods(cells: Cells, own: Tensor) -> Tensor:
    """(cells, components): as logarithms, up to a constant."""
    whole = own + cells.deviation.square().unsqueeze(1)
    return -(cells.seen.square().unsqueeze(1) / whole + whole.log()) / 2


def _fitted(cells: Cells, widths: list[Tensor]) -> Tensor:
    likelihoods = torch.softmax(_likelihoods(cells, _variances(cells, widths)), dim=1)
    shares = torch.full((likelihoods.shape[1],), 1 / likelihoods.shape[1], dtype=torch.float64)
    for _ in range(STEPS):
        of_cell = likelihoods * shares
        found = (of_cell / of_cell.sum(dim=1, keepdim=True)).sum(dim=0)
        found[0] += PRIOR
        shares = found / found.sum()
    return shares


def _absolute(cells: Cells, widths: list[Tensor], shares: Tensor) -> Tensor:
    """The mean absolute difference given what was seen: of each component a folded normal distribution's."""
    own, noise = _variances(cells, widths), cells.deviation.square().unsqueeze(1)
    chances = torch.softmax(_likelihoods(cells, own) + shares.log(), dim=1)
    mean, spread = cells.seen.unsqueeze(1) * own / (own + noise), (own * noise / (own + noise)).sqrt()
    ratio = mean / spread
    folded = spread * FOLDED * torch.exp(-ratio.square() / 2) + mean * torch.erf(ratio / math.sqrt(2))
    return (chances * folded).sum(dim=1)


RELEASED = Need(
    lambda evaluation: COUNTS in evaluation.generator.server.memory,
    "no silo released counts for it; name it in evaluation.metrics before a run",
)


def fidelity(evaluation: Evaluation) -> Values:
    """Distance of marginals of samples and training rows, by noisy counts at a share of the budget: in federations too.

    It needs no record at the server; ``privacy.shares.fidelity`` is what it costs.
    """
    schema, memory = schema_of(evaluation.real.federation.modality.name), evaluation.generator.server.memory
    found = {}
    for number, (group, samples) in enumerate(evaluation.samples.items()):
        values = distances(schema, memory[COUNTS][number], float(memory[NOISE]), samples.double().cpu())
        for ways, distance in zip(("1-way", "2-way"), values, strict=True):
            found[metric_key(FIDELITY, ways, len(samples), group)] = distance.value
            found[metric_key(FIDELITY, f"{ways}-limit", len(samples), group)] = distance.limit
    return found


METRIC = Metric(
    FIDELITY,
    fidelity,
    (
        Reading("fidelity/*-limit", "Distance that noise can hide", counts="rows", of_records=False),
        Reading("fidelity/*", "Noisy distance of marginals", "lower", "rows", fewest=FEW, of_records=False),
    ),
    needs=(TABLE, RELEASED, SAMPLES),
    released=True,
)
