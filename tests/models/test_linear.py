from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from fedloom.errors import ConfigError
from fedloom.models.linear import LinearVAE
from fedloom.models.networks import Flat, Routed

VARIANCE, LATENT, WIDTH = 0.3, 2, 5
MEANS = torch.tensor([[0.5, -1.0], [2.0, 0.0]])


def dense(decoder: Flat, mean: Tensor) -> tuple[MultivariateNormal, Tensor, Tensor, Tensor]:
    """The joint distribution of (z, x), written out: p(x), and the parts of its covariance."""
    layer = decoder.layers[0]
    assert isinstance(layer, nn.Linear)
    weight, bias = layer.weight.double(), layer.bias.double()
    across = weight @ torch.eye(LATENT, dtype=torch.float64)
    inside = weight @ weight.mT + VARIANCE * torch.eye(WIDTH, dtype=torch.float64)
    return MultivariateNormal(weight @ mean.double() + bias, inside), weight @ mean.double() + bias, across, inside


@pytest.mark.parametrize("routed", [False, True])
def test_posterior_and_evidence_are_those_of_the_joint_normal(routed: bool) -> None:
    """Conditioning the dense joint normal of z and x, in float64."""
    torch.manual_seed(0)
    branches = {group: Flat((LATENT,), (), (WIDTH,)) for group in range(2)}
    decoder = Routed(branches) if routed else branches[0]
    model = LinearVAE(decoder, MEANS, VARIANCE)
    x, group = torch.randn(7, WIDTH), torch.arange(7) % 2
    found, surprise = model.encode(x, group), model.surprise(x, group)
    for row in range(7):
        number = int(group[row])
        marginal, centre, across, inside = dense(branches[number if routed else 0], MEANS[number])
        gain = across.mT @ torch.linalg.inv(inside)
        mean = MEANS[number].double() + gain @ (x[row].double() - centre)
        covariance = torch.eye(LATENT, dtype=torch.float64) - gain @ across
        torch.testing.assert_close(found.mean[row].double(), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.log_variance[row].double().exp(), covariance.diagonal(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(surprise[row].double(), -marginal.log_prob(x[row].double()), rtol=1e-5, atol=1e-5)


def test_principal_components_are_the_best_decoder() -> None:
    """Tipping and Bishop's equation 7: the first eigenvectors, as long as the root of their value less the variance."""
    torch.manual_seed(0)
    x = torch.randn(300, 2, dtype=torch.float64) @ torch.randn(2, WIDTH, dtype=torch.float64) * 2 + 1
    x = x + VARIANCE**0.5 * torch.randn(300, WIDTH, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(torch.cov(x.mT, correction=0))
    model = LinearVAE(Flat((LATENT,), (), (WIDTH,)), torch.zeros(1, LATENT), VARIANCE).double()
    layer = model.decoder.layers[0]  # type: ignore[union-attr, index]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.weight.copy_(vectors[:, -LATENT:] * (values[-LATENT:] - VARIANCE).sqrt())
        layer.bias.copy_(x.mean(dim=0))
    group = torch.zeros(300, dtype=torch.int64)
    best = model.surprise(x, group).mean()
    for gradient in torch.autograd.grad(best, [layer.weight, layer.bias]):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))
    with torch.no_grad():
        layer.weight.mul_(1.1)
    assert model.surprise(x, group).mean() > best + 1e-3


def test_the_likelihood_is_that_of_the_output_itself() -> None:
    model = LinearVAE(Flat((LATENT,), (), (WIDTH,)), MEANS, VARIANCE)
    x, output = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    wanted = -torch.distributions.Normal(output, VARIANCE**0.5).log_prob(x).sum(dim=1)
    torch.testing.assert_close(model.likelihood.negative_log(x, output), wanted)
    assert torch.equal(model.likelihood.mean(output), output)


def test_a_decoder_that_is_not_linear_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs a linear decoder: model.network = 'mlp', model.hidden = \[\]"):
        LinearVAE(Flat((LATENT,), (4,), (WIDTH,)), MEANS, VARIANCE)
