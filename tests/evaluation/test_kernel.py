from itertools import permutations, product

import pytest
import torch

from fedloom.errors import DataError
from fedloom.evaluation import kernel
from fedloom.evaluation.kernel import kernel_distance

REAL = torch.randn(11, 5, generator=torch.Generator().manual_seed(0))
GENERATED = 1.3 * torch.randn(7, 5, generator=torch.Generator().manual_seed(1)) + 0.4


def u_statistic(x: list[list[float]], y: list[list[float]]) -> float:
    """Straight from the definition, pair by pair."""

    def k(a: list[float], b: list[float]) -> float:
        return (sum(p * q for p, q in zip(a, b, strict=True)) / len(a) + 1) ** 3

    within = [sum(k(a, b) for a, b in permutations(z, 2)) / (len(z) * (len(z) - 1)) for z in (x, y)]
    return sum(within) - 2 * sum(k(a, b) for a, b in product(x, y)) / (len(x) * len(y))


@pytest.mark.parametrize("rows", [1024, 3])
def test_against_the_double_loop(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_ROWS", rows)
    expected = u_statistic(REAL.double().tolist(), GENERATED.double().tolist())
    assert kernel_distance(REAL, GENERATED) == pytest.approx(expected, rel=1e-12)


def test_one_dimension_by_hand() -> None:
    # k(0, 0) = 1, k(1, 1) = 8, k(0, 1) = 1: within {0, 0} 1, within {1, 1} 8, between 1: 1 + 8 - 2.
    assert kernel_distance(torch.zeros(2, 1), torch.ones(2, 1)) == 7.0


def test_one_sample_has_no_pairs() -> None:
    with pytest.raises(DataError, match="at least 2 samples"):
        kernel_distance(REAL, GENERATED[:1])
