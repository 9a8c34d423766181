"""The kernel distance (KID; Binkowski et al., 2018): unbiased squared MMD with a cubic polynomial kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.errors import DataError
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import FEW, Metric, Reading, Values
from fedloom.evaluation.needs import FEATURES, SAMPLES
from fedloom.runs.metrics import metric_key

_ROWS = 1024


def kernel_distance(real: Tensor, generated: Tensor) -> float:
    """The U-statistic over all pairs; it may be slightly negative when the two do not differ."""
    for features in (real, generated):
        if len(features) < 2:
            raise DataError(f"the kernel distance needs at least 2 samples of each kind, not {len(features)}")
    real, generated = real.to(torch.float64), generated.to(torch.float64)
    between = _kernel_sum(real, generated) / (len(real) * len(generated))
    return _mean_of_pairs(real) + _mean_of_pairs(generated) - 2.0 * between


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1.0) ** 3


def _kernel_sum(x: Tensor, y: Tensor) -> float:
    """The sum over all pairs, a block of rows at a time."""
    return sum(_kernel(rows, y).sum().item() for rows in torch.split(x, _ROWS))


def _mean_of_pairs(x: Tensor) -> float:
    """The mean kernel over pairs of different samples."""
    with_itself = ((x.square().sum(dim=1) / x.shape[1] + 1.0) ** 3).sum().item()
    return (_kernel_sum(x, x) - with_itself) / (len(x) * (len(x) - 1))


def kernel(evaluation: Evaluation) -> Values:
    """The kernel distance of samples to held-out records."""
    return {
        metric_key("kernel", evaluation.backbone, len(features), group): kernel_distance(
            evaluation.real.features[group], features
        )
        for group, features in evaluation.features.items()
    }


METRIC = Metric(
    "kernel", kernel, (Reading("kernel/*", "Kernel distance", better="lower", fewest=FEW),), needs=(SAMPLES, FEATURES)
)
