import warnings

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from fedloom.errors import DataError, FedloomWarning
from fedloom.evaluation.frechet import Moments, frechet_distance

PLENTY = 10**6  # a count that raises no warning, for moments that are given


def spread_features(count: int, dimension: int, seed: int) -> Tensor:
    """Correlated features whose variances span six orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dimension, dimension, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-3, 0, dimension, dtype=torch.float64)
    return torch.randn(count, dimension, generator=generator, dtype=torch.float64) @ (scale[:, None] * mixing) + seed


def test_against_the_matrix_square_root() -> None:
    first, second = spread_features(500, 40, seed=0), spread_features(400, 40, seed=1)
    c1, c2 = np.cov(first.numpy(), rowvar=False), np.cov(second.numpy(), rowvar=False)
    shift = first.numpy().mean(0) - second.numpy().mean(0)
    root = scipy.linalg.sqrtm(c1 @ c2)
    expected = shift @ shift + np.trace(c1) + np.trace(c2) - 2 * np.trace(root).real
    assert frechet_distance(Moments.of(first), Moments.of(second)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("mean", "variances", "expected"),
    [
        # Diagonal Gaussians: the sum over axes of (m1 - m2)^2 + (s1 - s2)^2, against N(0, diag(1, 4, 9)).
        ([0.0, 0.0, 0.0], [1.0, 4.0, 9.0], 0.0),
        ([1.0, 0.0, -2.0], [1.0, 4.0, 9.0], 5.0),
        ([0.0, 0.0, 0.0], [4.0, 1.0, 25.0], 1.0 + 1.0 + 4.0),
        ([3.0, 0.0, 0.0], [0.0, 0.0, 0.0], 9.0 + 1.0 + 4.0 + 9.0),
    ],
)
def test_gaussians_with_known_moments(mean: list[float], variances: list[float], expected: float) -> None:
    rotation = torch.linalg.qr(spread_features(3, 3, seed=2)).Q

    def rotated(center: list[float], spread: list[float]) -> Moments:
        covariance = rotation @ torch.diag(torch.tensor(spread, dtype=torch.float64)) @ rotation.T
        return Moments(rotation @ torch.tensor(center, dtype=torch.float64), covariance, PLENTY)

    distance = frechet_distance(rotated([0.0, 0.0, 0.0], [1.0, 4.0, 9.0]), rotated(mean, variances))
    assert distance == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_singular_covariances_lose_no_digits() -> None:
    # 20 samples in 300 dimensions; doubling centred features doubles every deviation: tr(C) (2 - 1)^2.
    features = spread_features(20, 300, seed=3)
    features = features - features.mean(0)
    with pytest.warns(FedloomWarning, match="20 samples in 300 dimensions"):
        distance = frechet_distance(Moments.of(features), Moments.of(2 * features))
    assert distance == pytest.approx(Moments.of(features).covariance.trace().item(), rel=1e-10)


def test_eigenvalues_that_do_not_converge_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Tensor) -> None:
        raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")

    features = torch.randn(2, 40, 6, generator=torch.Generator().manual_seed(0))
    features[..., 4:] = 0.0  # as of units that are always off
    expected = frechet_distance(*map(Moments.of, features))
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    assert frechet_distance(*map(Moments.of, features)) == pytest.approx(expected, rel=1e-12)


def test_the_warning_stands_at_the_dimension() -> None:
    enough = Moments.of(spread_features(8, 8, seed=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert frechet_distance(enough, enough) == pytest.approx(0.0, abs=1e-12)
    with pytest.warns(FedloomWarning):
        frechet_distance(enough, Moments.of(spread_features(7, 8, seed=0)))


def test_moments_are_float64_and_unbiased() -> None:
    features = torch.tensor([[1e4, 0.0], [1e4 + 1, 2.0], [1e4 + 2, 4.0]], dtype=torch.float32)
    moments = Moments.of(features)
    assert moments.mean.tolist() == [1e4 + 1, 2.0]
    assert moments.covariance.tolist() == [[1.0, 2.0], [2.0, 4.0]]
    assert moments.count == 3


@pytest.mark.parametrize(
    ("features", "sentence"),
    [(torch.zeros(1, 3), "at least 2"), (torch.tensor([[0.0], [float("nan")]]), "not finite")],
)
def test_features_without_moments(features: Tensor, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        Moments.of(features)
