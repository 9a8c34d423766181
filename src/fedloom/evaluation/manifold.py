"""Fidelity and variety by k-nearest-neighbour balls.

Precision and recall after Kynkaanniemi et al. (2019), density and coverage after Naeem et al. (2020).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from fedloom.errors import DataError
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import FEW, Metric, Reading, Values
from fedloom.evaluation.needs import FEATURES, SAMPLES
from fedloom.evaluation.neighbours import distance_blocks, neighbour_radii
from fedloom.runs.metrics import metric_key

NEIGHBOURS = 5


@dataclass(frozen=True)
class ManifoldScores:
    """Precision and density speak of fidelity, recall and coverage of variety."""

    precision: float  # share of generated samples inside some real sample's ball
    recall: float  # share of real samples inside some generated sample's ball
    density: float  # real balls that hold a generated sample, in units of k; may exceed 1
    coverage: float  # share of real balls that hold a generated sample


def manifold_scores(real: Tensor, generated: Tensor, neighbours: int = 5) -> ManifoldScores:
    """All four scores in one pass; a ball reaches to the k-th nearest neighbour of its own kind."""
    fewest = min(len(real), len(generated))
    if not 1 <= neighbours < fewest:
        raise DataError(f"neighbours = {neighbours} must be at least 1 and less than the {fewest} samples of a kind")
    real_radii, generated_radii = neighbour_radii(real, neighbours), neighbour_radii(generated, neighbours)
    inside = torch.zeros(len(generated), dtype=torch.int64, device=generated.device)
    recalled, covered = 0, 0
    for rows, distances in distance_blocks(real, generated):
        in_real_ball = distances <= real_radii[rows, None]
        inside += in_real_ball.sum(dim=0)
        covered += int(in_real_ball.any(dim=1).sum())
        recalled += int((distances <= generated_radii).any(dim=1).sum())
    return ManifoldScores(
        precision=(inside > 0).double().mean().item(),
        recall=recalled / len(real),
        density=inside.double().mean().item() / neighbours,
        coverage=covered / len(real),
    )


def manifold(evaluation: Evaluation) -> Values:
    """Precision, recall, density and coverage by balls to the fifth neighbour."""
    found, variant = {}, f"{evaluation.backbone}-k{NEIGHBOURS}"
    for group, features in evaluation.features.items():
        scores = manifold_scores(evaluation.real.features[group], features, NEIGHBOURS)
        for name, value in asdict(scores).items():
            found[metric_key(name, variant, len(features), group)] = value
    return found


METRIC = Metric(
    "manifold",
    manifold,
    tuple(
        Reading(f"{field.name}/*", field.name.capitalize(), better="higher", fewest=FEW)
        for field in fields(ManifoldScores)
    ),
    needs=(SAMPLES, FEATURES),
)
