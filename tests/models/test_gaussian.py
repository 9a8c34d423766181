from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributions

from fedloom.models.gaussian import DiagonalGaussian, kl_divergence, kl_to_unit

numbers = st.floats(-3, 3)
rows = st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=5)


def torch_normal(gaussian: DiagonalGaussian) -> distributions.Normal:
    return distributions.Normal(gaussian.mean, torch.exp(0.5 * gaussian.log_variance))


def gaussians(columns: list[tuple[float, float, float, float]]) -> tuple[DiagonalGaussian, DiagonalGaussian]:
    """One row of a latent with as many dimensions as there are columns."""
    table = torch.tensor(columns, dtype=torch.float64).T.unsqueeze(1)
    return DiagonalGaussian(table[0], table[1]), DiagonalGaussian(table[2], table[3])


@given(rows)
def test_divergences_and_density_equal_torch_distributions(columns: list[tuple[float, float, float, float]]) -> None:
    q, p = gaussians(columns)
    expected = distributions.kl_divergence(torch_normal(q), torch_normal(p)).sum(dim=-1)
    torch.testing.assert_close(kl_divergence(q, p), expected, rtol=1e-9, atol=1e-9)
    unit = distributions.Normal(p.mean, torch.ones_like(p.mean))
    expected = distributions.kl_divergence(torch_normal(q), unit).sum(dim=-1)
    torch.testing.assert_close(kl_to_unit(q, p.mean), expected, rtol=1e-9, atol=1e-9)
    expected = torch_normal(q).log_prob(p.mean).sum(dim=-1)
    torch.testing.assert_close(q.log_density(p.mean), expected, rtol=1e-9, atol=1e-9)


def test_divergence_of_one_dimension_by_hand() -> None:
    """KL(N(1, 4) || N(3, 2)) = 1/2 [log(2/4) + (4 + (1 - 3)^2) / 2 - 1] = 1/2 [3 - log 2]."""
    q = DiagonalGaussian(torch.tensor([[1.0]]), torch.tensor([[math.log(4)]]))
    p = DiagonalGaussian(torch.tensor([[3.0]]), torch.tensor([[math.log(2)]]))
    assert kl_divergence(q, p).item() == pytest.approx((3 - math.log(2)) / 2, rel=1e-6)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_equation_1_for_means_minus_one_and_plus_one(sign: float) -> None:
    """KL(N(mu, s2) || N(-+1, 1)) = 1/2 sum[s2 + mu^2 +- 2 mu - log s2], because (mu -+ 1)^2 - 1 = mu^2 -+ 2 mu.

    Worked for mu = (1/2, -2) and s2 = (e, 1), mean +1:
    dimension 1: e + 1/4 - 1 - 1 = e - 7/4;  dimension 2: 1 + 4 + 4 - 0 = 9;  half the sum: (e + 29/4) / 2.
    Mean -1: dimension 1: e + 1/4 + 1 - 1 = e + 1/4;  dimension 2: 1 + 4 - 4 - 0 = 1;  half the sum: (e + 5/4) / 2.
    """
    mean, variance = torch.tensor([[0.5, -2.0]]), torch.tensor([[math.e, 1.0]])
    found = kl_to_unit(DiagonalGaussian(mean, torch.log(variance)), torch.full((1, 2), sign))
    formula = 0.5 * (variance + mean**2 - sign * 2 * mean - torch.log(variance)).sum()
    worked = (math.e + (29 if sign > 0 else 5) / 4) / 2
    assert found.item() == pytest.approx(worked, rel=1e-6)
    assert formula.item() == pytest.approx(worked, rel=1e-6)


def test_a_distribution_has_no_divergence_from_itself() -> None:
    q = DiagonalGaussian(torch.tensor([[0.3, -1.0]]), torch.tensor([[0.7, -2.0]]))
    assert kl_divergence(q, q).item() == 0
    assert kl_to_unit(DiagonalGaussian(torch.ones(1, 2), torch.zeros(1, 2)), torch.ones(1, 2)).item() == 0


def test_samples_are_mean_plus_deviation_times_noise() -> None:
    q = DiagonalGaussian(torch.tensor([[1.0, 2.0]]), torch.tensor([[math.log(4), math.log(9)]]))
    expected: Tensor = torch.tensor([[1 + 2 * 0.5, 2 - 3 * 1.0]])
    torch.testing.assert_close(q.sample(torch.tensor([[0.5, -1.0]])), expected)
