import math

import pytest
import torch

from fedloom.errors import DataError
from fedloom.evaluation.inception_score import inception_score

SURE = 1000.0


def test_sure_and_even_over_classes_scores_their_number() -> None:
    score = inception_score(SURE * torch.eye(4).repeat(5, 1), splits=5)
    assert score.mean == pytest.approx(4.0, rel=1e-12)
    assert score.deviation == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("logits", [torch.zeros(6, 4), SURE * torch.eye(4)[[2] * 6]])
def test_undecided_or_collapsed_scores_one(logits: torch.Tensor) -> None:
    assert inception_score(logits, splits=2).mean == pytest.approx(1.0, rel=1e-12)


def test_against_a_hand_computation() -> None:
    # p = (3/4, 1/4) and (1/4, 3/4), marginal (1/2, 1/2): KL = 3/4 ln(3/2) + 1/4 ln(1/2) for both.
    logits = torch.tensor([[3.0, 1.0], [1.0, 3.0]], dtype=torch.float64).log()
    expected = math.exp(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert inception_score(logits, splits=1).mean == pytest.approx(expected, rel=1e-12)


def test_deviation_over_splits() -> None:
    # The first split is sure of two classes (2), the second collapsed (1): mean 3/2, deviation 1/2.
    score = inception_score(SURE * torch.eye(2)[[0, 1, 0, 0]], splits=2)
    assert (score.mean, score.deviation) == (pytest.approx(1.5), pytest.approx(0.5))


@pytest.mark.parametrize("splits", [0, 7])
def test_impossible_splits(splits: int) -> None:
    with pytest.raises(DataError, match=f"splits = {splits} must be"):
        inception_score(torch.zeros(6, 2), splits=splits)
