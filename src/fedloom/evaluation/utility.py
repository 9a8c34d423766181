"""What synthetic records are good for: a classifier learns from one table and is tested on another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.evaluation.probe import predict


@dataclass(frozen=True, eq=False)
class Labelled:
    """Features or pixels with their class and group."""

    x: Tensor
    y: Tensor
    group: Tensor


@dataclass(frozen=True)
class Accuracy:
    """The share of right answers: over all records, in the worst class, in the worst group."""

    mean: float
    worst_class: float
    worst_group: float


@dataclass(frozen=True)
class Utility:
    """Each named by what was learned from and what was tested on; ``real_to_real`` is the mark to reach."""

    synthetic_to_real: Accuracy
    real_to_synthetic: Accuracy
    real_to_real: Accuracy


def utility(real_train: Labelled, real_test: Labelled, synthetic: Labelled) -> Utility:
    """Train on synthetic and test on real, the reverse, and train on real for comparison."""
    return Utility(
        synthetic_to_real=transfer_accuracy(synthetic, real_test),
        real_to_synthetic=transfer_accuracy(real_train, synthetic),
        real_to_real=transfer_accuracy(real_train, real_test),
    )


def transfer_accuracy(train: Labelled, test: Labelled) -> Accuracy:
    """The accuracy on ``test`` of a logistic regression that learned from ``train``."""
    predicted = torch.from_numpy(predict(train.x, train.y, test.x))
    right = (predicted == test.y.cpu()).to(torch.float64)
    return Accuracy(right.mean().item(), _worst(right, test.y.cpu()), _worst(right, test.group.cpu()))


def _worst(right: Tensor, part: Tensor) -> float:
    """The lowest mean over the parts that occur."""
    return min(right[part == number].mean().item() for number in torch.unique(part))
