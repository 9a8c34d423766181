import pytest
import torch
from torch import Tensor

from fedloom.errors import DataError
from fedloom.evaluation import neighbours
from fedloom.evaluation.manifold import ManifoldScores, manifold_scores


def points(*values: float) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


def modes(*centres: float, seed: int = 0) -> Tensor:
    """Fifty points around each centre of a line in 3-D."""
    noise = torch.randn(50 * len(centres), 3, generator=torch.Generator().manual_seed(seed))
    return noise + torch.tensor(centres).repeat_interleave(50).unsqueeze(1)


@pytest.mark.parametrize("rows", [1024, 2])
def test_a_set_of_points_by_hand(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real 0, 1, 3, 10 reach 1, 1, 2, 7 to their nearest; generated 0.5, 4, 20 reach 3.5, 3.5, 16.

    Generated 0.5 lies in the balls of 0 and 1, 4 in those of 3 and 10, 20 in none: precision 2/3, density
    (2 + 2 + 0) / 3. Every real ball holds one of them: coverage 1. Real 0, 1, 3 lie within 3.5 of 0.5 and 10 within
    16 of 20: recall 1.
    """
    monkeypatch.setattr(neighbours, "_ROWS", rows)
    scores = manifold_scores(points(0, 1, 3, 10), points(0.5, 4, 20), neighbours=1)
    assert scores == ManifoldScores(
        precision=pytest.approx(2 / 3), recall=1.0, density=pytest.approx(4 / 3), coverage=1.0
    )


def test_radii_reach_to_the_kth_other_point() -> None:
    line = points(0, 1, 3, 7)
    assert neighbours.neighbour_radii(line, 1).tolist() == [1, 1, 2, 4]
    assert neighbours.neighbour_radii(line, 2).tolist() == [3, 2, 3, 6]


def test_mode_collapse_is_precise_but_forgets() -> None:
    scores = manifold_scores(modes(0, 20, 40, 60), modes(0, 0, 0, 0, seed=1))
    assert scores.precision > 0.9
    assert scores.density > 0.9
    assert scores.recall < 0.3
    assert scores.coverage < 0.3


def test_invention_recalls_but_is_imprecise() -> None:
    scores = manifold_scores(modes(0, 0, 0, 0), modes(0, 20, 40, 60, seed=1))
    assert scores.precision < 0.3
    assert scores.density < 0.3
    assert scores.recall > 0.9


def test_the_same_distribution_scores_high_everywhere() -> None:
    scores = manifold_scores(modes(0, 20, 40, 60), modes(0, 20, 40, 60, seed=1))
    assert min(scores.precision, scores.recall, scores.density, scores.coverage) > 0.8


@pytest.mark.parametrize("count", [0, 3])
def test_impossible_neighbours(count: int) -> None:
    with pytest.raises(DataError, match=f"neighbours = {count} must be"):
        manifold_scores(points(0, 1, 3, 10), points(0, 1, 2), neighbours=count)
