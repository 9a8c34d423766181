from __future__ import annotations

import math

import pytest
import torch
from sklearn import metrics

from fedloom.errors import DataError
from fedloom.evaluation.classification import confusion, fit_head, score

THREE = torch.arange(3)


def rows(count: int, classes: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.tensor(classes)[torch.randint(0, len(classes), (count,), generator=generator)]
    return torch.eye(4)[y] + 0.4 * torch.randn(count, 4, generator=generator), y


def test_a_head_learns_what_logistic_regression_learns_at_a_minimum() -> None:
    x, y = rows(200, (0, 1, 2))
    head = fit_head(x, y, 3)
    # The gradient of mean(-log p) + |W|^2 / (2 C n) is below the solver's tolerance, for vectors of mean length 1.
    length = x.double().square().sum(1).mean().sqrt()
    errors = head.probabilities(x) - torch.eye(3, dtype=torch.float64)[y]
    gradient = errors.T @ (x.double() / length) / 200 + head.weight * length / (10.0 * 200)
    assert gradient.abs().max() <= 1e-4
    assert errors.mean(0).abs().max() <= 1e-4


@pytest.mark.parametrize("classes", [(0, 2), (1, 2, 3), (3,)])
def test_a_class_that_was_never_seen_is_never_answered(classes: tuple[int, ...]) -> None:
    x, y = rows(60, classes)
    found = fit_head(x, y, 5).probabilities(x)
    assert found.shape == (60, 5)
    torch.testing.assert_close(found.sum(1), torch.ones(60, dtype=torch.float64))
    unseen = [label for label in range(5) if label not in classes]
    assert found[:, unseen].abs().max() == 0
    assert (found.argmax(1) == y).double().mean() > 0.8


def test_the_unit_of_the_vectors_changes_nothing() -> None:
    x, y = rows(80, (0, 1, 2))
    small, large = (fit_head(scale * x, y, 3).probabilities(scale * x) for scale in (0.1, 50.0))
    torch.testing.assert_close(small, large, atol=1e-6, rtol=0)


@pytest.mark.parametrize("y", [torch.tensor([0, -1]), torch.empty(0, dtype=torch.int64)])
def test_records_without_labels_are_refused(y: torch.Tensor) -> None:
    with pytest.raises(DataError, match="needs records, and a label for each"):
        fit_head(torch.zeros(len(y), 3), y, 2)


def test_scores_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(1)
    truth, predicted = (torch.randint(0, 3, (90,), generator=generator) for _ in range(2))
    found = score(confusion(truth, predicted, 3, 3), THREE)
    assert found.accuracy == pytest.approx(metrics.accuracy_score(truth, predicted))
    assert found.balanced_accuracy == pytest.approx(metrics.balanced_accuracy_score(truth, predicted))
    assert found.macro_f1 == pytest.approx(metrics.f1_score(truth, predicted, average="macro"))
    assert found.worst_group == pytest.approx(metrics.recall_score(truth, predicted, average=None).min())


def test_shares_weigh_classes_as_they_occur_elsewhere() -> None:
    counts = torch.tensor([[8.0, 2.0, 0.0], [5.0, 5.0, 0.0], [0.0, 0.0, 4.0]], dtype=torch.float64)
    shares = torch.tensor([0.75, 0.25, 0.0], dtype=torch.float64)
    found = score(counts, THREE, shares)
    assert found.accuracy == pytest.approx(0.75 * 0.8 + 0.25 * 0.5)
    assert found.balanced_accuracy == pytest.approx((0.8 + 0.5) / 2)  # the third class does not occur
    assert found.worst_group == pytest.approx(0.5)
    # Class 0: 0.6 right of 0.75, answered 0.6 + 0.125 times; class 1: 0.125 of 0.25, answered 0.125 + 0.15 times.
    assert found.macro_f1 == pytest.approx((1.2 / (0.75 + 0.725) + 0.25 / (0.25 + 0.275)) / 2)


def test_kinds_of_a_class_are_added_up_and_the_worst_group_is_found() -> None:
    counts = torch.tensor([[9.0, 1.0], [2.0, 2.0], [0.0, 10.0], [1.0, 3.0], [0.0, 0.0]], dtype=torch.float64)
    found = score(counts, torch.tensor([0, 0, 1, 1, 1]))
    assert found.accuracy == pytest.approx(24 / 28)
    assert found.balanced_accuracy == pytest.approx((11 / 14 + 13 / 14) / 2)
    assert found.worst_group == pytest.approx(2 / 4)  # a group without records is none
    assert math.isfinite(found.macro_f1)
