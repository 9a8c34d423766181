"""Does the generator copy? Samples and held-out images, each against their nearest training image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fedloom.errors import DataError
from fedloom.evaluation.metric import Metric, Reading, Values
from fedloom.evaluation.needs import SAMPLES, SILO_RECORDS
from fedloom.evaluation.neighbours import nearest
from fedloom.outline import in_outline
from fedloom.runs.metrics import metric_key

if TYPE_CHECKING:
    from fedloom.evaluation.evidence import Evaluation


@dataclass(frozen=True, eq=False)
class Memorisation:
    """The nearest training record, by distance and index, of every sample and every held-out record."""

    __repr__ = in_outline

    sample_distances: Tensor  # (n,) float64
    sample_neighbours: Tensor  # (n,) int64 index into the training records
    held_out_distances: Tensor
    held_out_neighbours: Tensor

    @property
    def distance_ratio(self) -> float:
        """Median distance of samples over that of held-out records; far below 1 suggests copies or blur."""
        return (self.sample_distances.median() / self.held_out_distances.median()).item()

    def copy_rate(self, quantile: float = 0.01) -> float:
        """The share of samples nearer to training than that quantile of held-out records; by chance, that share."""
        bound = self.held_out_distances.quantile(quantile)
        return (self.sample_distances < bound).double().mean().item()

    def closest(self, count: int) -> Tensor:
        """Indices of the samples nearest to a training record, nearest first: the pictures worth showing."""
        return self.sample_distances.argsort(stable=True)[:count]


def memorisation(samples: Tensor, held_out: Tensor, training: Tensor) -> Memorisation:
    """Compare by Euclidean distance, on pixels or on features; all three must be of one kind."""
    for name, table in (("samples", samples), ("held-out records", held_out), ("training records", training)):
        if len(table) == 0:
            raise DataError(f"memorisation needs at least one of each, but there are no {name}")
    return Memorisation(*nearest(samples, training), *nearest(held_out, training))


def copies(evaluation: Evaluation) -> Values:
    """How near samples lie to their nearest training record, beside how near held-out records do."""
    found = {}
    for group, result in evaluation.memorisation.items():
        count = len(result.sample_distances)
        found[metric_key("memorisation", "pixels-distance-ratio", count, group)] = result.distance_ratio
        found[metric_key("memorisation", "pixels-copy-rate", count, group)] = result.copy_rate()
    return found


METRIC = Metric(
    "memorisation",
    copies,
    (
        Reading("memorisation/*-distance-ratio", "Distance to training records"),
        Reading("memorisation/*-copy-rate", "Samples that may be copies"),
    ),
    needs=(SILO_RECORDS, SAMPLES),
)
