"""Linear classifiers of vectors, trained to convergence, and what their answers are worth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedloom.errors import DataError
from fedloom.evaluation.probe import sklearn
from fedloom.outline import in_outline

STRENGTH = 10.0  # inverse weight of the L2 penalty, for vectors of length 1
ITERATIONS = 2000


@dataclass(frozen=True, eq=False)
class Head:
    """The logit of every class; minus infinity where a class was never seen."""

    __repr__ = in_outline

    weight: Tensor  # (classes, width)
    bias: Tensor

    def probabilities(self, x: Tensor) -> Tensor:
        """A row that sums to 1 for each vector, float64."""
        return functional.softmax(x.to(torch.float64) @ self.weight.T + self.bias, dim=1)


def fit_head(x: Tensor, y: Tensor, classes: int) -> Head:
    """Multinomial logistic regression; one that has met a single class always answers with it."""
    if len(x) == 0 or bool((y < 0).any()):
        raise DataError("a classifier needs records, and a label for each of them")
    rows = x.to(torch.float64)
    weight = torch.zeros(classes, x.shape[1], dtype=torch.float64)
    bias = torch.full((classes,), -math.inf, dtype=torch.float64)
    seen = torch.unique(y)
    if len(seen) == 1:
        bias[seen] = 0.0
        return Head(weight, bias)
    length = rows.square().sum(dim=1).mean().sqrt().clamp_min(1e-12)  # so that the vectors' unit changes nothing
    model = sklearn("linear_model").LogisticRegression(C=STRENGTH, max_iter=ITERATIONS)
    model.fit((rows / length).numpy(), y.numpy())
    found, constant = torch.from_numpy(model.coef_) / length, torch.from_numpy(model.intercept_)
    if len(seen) == 2:  # then it has the logit of the second class alone
        found, constant = torch.cat([-found, found]) / 2, torch.cat([-constant, constant]) / 2
    weight[seen], bias[seen] = found.to(torch.float64), constant.to(torch.float64)
    return Head(weight, bias)


@dataclass(frozen=True)
class Scores:
    """Shares of right answers: over records, over classes that occur, as mean F1 of those, in the worst group.

    Groups are the kinds of records: classes, or classes under each value of an attribute (Sagawa et al., ICLR 2020).
    """

    accuracy: float
    balanced_accuracy: float
    macro_f1: float
    worst_group: float


def confusion(truth: Tensor, predicted: Tensor, kinds: int, classes: int) -> Tensor:
    """How many records of each true kind (row) were taken for each class, (kinds, classes) float64."""
    return torch.bincount(truth * classes + predicted, minlength=kinds * classes).reshape(kinds, classes).double()


def recalls(counts: Tensor, class_of: Tensor) -> Tensor:
    """The share of right answers for each kind of records; not a number where there are none."""
    return counts[torch.arange(len(counts)), class_of] / counts.sum(dim=1)


def score(counts: Tensor, class_of: Tensor, shares: Tensor | None = None) -> Scores:
    """What a confusion matrix says; its rows are kinds of records, each of a class.

    ``shares`` weighs the kinds as they occur somewhere else; kinds that the matrix has no record of are left out.
    """
    if shares is not None:
        counts = counts / counts.sum(dim=1, keepdim=True).clamp_min(1.0) * shares[:, None]
    classes = counts.shape[1]
    table = torch.zeros(classes, classes, dtype=torch.float64).index_add_(0, class_of, counts)
    right, of_class, answers = table.diagonal(), table.sum(dim=1), table.sum(dim=0)
    occurs = of_class > 0
    met = counts.sum(dim=1) > 0
    return Scores(
        accuracy=(right.sum() / of_class.sum()).item(),
        balanced_accuracy=(right / of_class)[occurs].mean().item(),
        macro_f1=(2 * right / (of_class + answers))[occurs].mean().item(),
        worst_group=recalls(counts, class_of)[met].min().item(),
    )
