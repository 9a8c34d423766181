"""How different samples are from each other: the number that shows a collapsed generator."""

from __future__ import annotations

import math

from torch import Tensor

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import FEW, Metric, Reading, Values
from fedloom.evaluation.needs import SAMPLES
from fedloom.runs.metrics import metric_key


def spread(samples: Tensor, real: Tensor) -> float:
    """Standard deviation over samples, averaged over pixels, as a share of that of real images.

    0: all samples are alike; 1: as different as real images; not a number where either is not finite.
    """
    value = (_deviation(samples) / _deviation(real)).item()
    return value if math.isfinite(value) else math.nan


def _deviation(images: Tensor) -> Tensor:
    centred = images.double() - images.double().mean(dim=0)
    return centred.square().mean(dim=0).sqrt().mean()


def pixel_spread(evaluation: Evaluation) -> Values:
    """How much a group's samples differ from each other, as a share of how much its held-out images do."""
    count, found = evaluation.config.samples, {}
    for index, group in enumerate(evaluation.groups):
        real = evaluation.real.federation.test.of_group(index).to(evaluation.real.device).values
        found[metric_key("spread", "pixels", count, group)] = spread(evaluation.samples[group], real)
    return found


METRIC = Metric(
    "spread",
    pixel_spread,
    (Reading("spread/*", "Spread of samples", fewest=FEW),),
    needs=(SAMPLES,),
)
