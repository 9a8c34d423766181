"""What synthetic records are good for: a classifier learns from one table and is tested on another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.evaluation.classification import confusion, fit_head, score
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import Metric, Reading, Values
from fedloom.evaluation.needs import EVERY_LABEL, SAMPLES, TOLD_CLASSES
from fedloom.evaluation.probe import predict
from fedloom.outline import in_outline
from fedloom.runs.metrics import metric_key


@dataclass(frozen=True, eq=False)
class Labelled:
    """Features or pixels with their class and group."""

    __repr__ = in_outline

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


def synthetic_utility(evaluation: Evaluation) -> Values:
    """A classifier learns from samples and is tested on all held-out records."""
    test, classes = evaluation.real.federation.test, len(evaluation.real.federation.classes)
    x = torch.cat([samples.flatten(1) for samples in evaluation.samples.values()]).cpu()
    head = fit_head(x, torch.cat(list(evaluation.labels.values())), classes)
    predicted = head.probabilities(test.values.flatten(1)).argmax(dim=1)
    found = score(confusion(test.y, predicted, classes, classes), torch.arange(classes))
    names = {
        "accuracy": found.accuracy,
        "balanced-accuracy": found.balanced_accuracy,
        "macro-f1": found.macro_f1,
    }
    return {metric_key("utility", f"synthetic-{name}", len(x)): value for name, value in names.items()}


METRIC = Metric(
    "utility",
    synthetic_utility,
    (Reading("utility/synthetic-*", "A classifier learned from samples", better="higher"),),
    needs=(SAMPLES, TOLD_CLASSES, EVERY_LABEL),
)
