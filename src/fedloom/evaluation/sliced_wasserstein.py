"""How far samples lie from held-out records, along random directions."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import Metric, Reading, Values
from fedloom.evaluation.needs import SAMPLES
from fedloom.runs.metrics import metric_key
from fedloom.streams import Streams

DIRECTIONS = 256


def sliced_distance(evaluation: Evaluation) -> Values:
    """The sliced 2-Wasserstein distance of samples to held-out records, as many of them."""
    found = {}
    for group, samples in evaluation.samples.items():
        real = evaluation.real.held_out[group].values.flatten(1)
        fake = samples[: len(real)].flatten(1).cpu()
        key = metric_key("sliced-wasserstein", f"directions-{DIRECTIONS}", len(fake), group)
        found[key] = sliced_wasserstein(real[: len(fake)], fake)
    return found


def sliced_wasserstein(one: Tensor, other: Tensor) -> float:
    """Root mean square, over public random directions, of the distance along one; both hold as many vectors."""
    drawn = Streams(0).normal("sliced-wasserstein", DIRECTIONS, one.shape[1]).to(torch.float64)
    directions = drawn / drawn.norm(dim=1, keepdim=True)
    along = [(rows.to(torch.float64) @ directions.T).sort(dim=0).values for rows in (one, other)]
    return float((along[0] - along[1]).square().mean().sqrt())


METRIC = Metric(
    "sliced-wasserstein",
    sliced_distance,
    (Reading("sliced-wasserstein/*", "Sliced Wasserstein distance", better="lower"),),
    needs=(SAMPLES,),
)
