from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, distributions

from fedloom.modalities.likelihoods import LIKELIHOODS, Bernoulli, Normal


def pixels(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_bernoulli_equals_torch_distributions_on_binary_images() -> None:
    x, logits = pixels(3, 1, 4, 5).round(), 6 * pixels(3, 1, 4, 5) - 3
    expected = -distributions.Bernoulli(logits=logits).log_prob(x).flatten(1).sum(dim=1)
    torch.testing.assert_close(Bernoulli().negative_log(x, logits), expected)


def test_bernoulli_of_a_grey_pixel_by_hand() -> None:
    """x = 1/4 under probability 3/4: -(1/4 log 3/4 + 3/4 log 1/4) = 2 log 2 - 1/4 log 3."""
    found = Bernoulli().negative_log(torch.tensor([[0.25]]), torch.tensor([[math.log(3)]]))
    assert found.item() == pytest.approx(2 * math.log(2) - math.log(3) / 4, rel=1e-6)


@pytest.mark.parametrize("variance", [0.5, 0.01])
def test_gaussian_equals_torch_distributions(variance: float) -> None:
    x, output = pixels(3, 2, 4, 4), 6 * pixels(3, 2, 4, 4) - 3
    normal = distributions.Normal(torch.sigmoid(output), math.sqrt(variance))
    expected = -normal.log_prob(x).flatten(1).sum(dim=1)
    torch.testing.assert_close(Normal(variance).negative_log(x, output), expected)


def test_gaussian_of_variance_one_half_is_squared_error_plus_half_log_pi_a_pixel() -> None:
    """sigmoid(0) = 1/2, so black and white pixels both cost 1/4 + 1/2 log(2 pi / 2)."""
    found = Normal().negative_log(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2))
    assert found.item() == pytest.approx(0.5 + math.log(math.pi), rel=1e-6)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_means_are_probabilities(name: str) -> None:
    output = torch.tensor([[0.0, math.log(3), -200.0, 200.0]])
    torch.testing.assert_close(LIKELIHOODS[name](0.5).mean(output), torch.tensor([[0.5, 0.75, 0.0, 1.0]]))
