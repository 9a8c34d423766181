from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fedloom.evaluation.likelihood import (
    ROWS,
    Likelihoods,
    bits_per_dimension,
    codes,
    draw,
    likelihoods,
    paper_reconstruction,
    reconstructions,
)
from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext
from fedloom.modalities.likelihoods import Bernoulli, Normal
from fedloom.models.vae import VAE, HierarchicalVAE
from fedloom.objectives.base import Objective, Step
from fedloom.objectives.elbo import Elbo
from fedloom.objectives.hierarchical_elbo import HierarchicalElbo
from fedloom.streams import Streams

STREAMS = Streams(3)
NOISE = 0.5  # variance of x around W z
SCALE = torch.tensor([1.5, 0.5])  # W's columns are orthogonal and have these lengths
SHIFT = torch.tensor([1.0, -2.0])  # prior mean of group 1; group 0 has none
ABOVE, WITHIN = torch.tensor([0.8, -0.3]), 0.4  # z1 = ABOVE * z2 + noise of variance WITHIN


@dataclass(frozen=True)
class Linear:
    """x ~ N(output, NOISE I), without a squashing function."""

    def negative_log(self, x: Tensor, output: Tensor) -> Tensor:
        return 0.5 * ((x - output) ** 2 / NOISE + math.log(2 * math.pi * NOISE)).sum(dim=1)

    def mean(self, output: Tensor) -> Tensor:
        return output


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data, layer.bias.data = weight, bias
    return layer


WEIGHT = torch.cat([torch.diag(SCALE), torch.zeros(1, 2)])  # (3, 2)


def statistics_layer(gain: Tensor, offset: Tensor, variance: Tensor) -> nn.Linear:
    """Mean gain * input + offset and a constant variance, side by side."""
    return linear(torch.cat([gain, torch.zeros_like(gain)]), torch.cat([offset, variance.log()]))


Case = tuple[VAE, torch.distributions.MultivariateNormal]


def flat_model(group: int, widened: float = 1.0) -> Case:
    """A linear VAE with its exact posterior (of wider variance where asked), and the exact p(x) of a group."""
    mean = group * SHIFT
    variance = 1 / (1 + SCALE**2 / NOISE)
    encoder = statistics_layer(variance[:, None] * WEIGHT.T / NOISE, variance * mean, widened * variance)
    model = VAE(encoder, linear(WEIGHT, torch.zeros(3)), torch.stack([0 * SHIFT, SHIFT]), Linear())
    exact = torch.distributions.MultivariateNormal(WEIGHT @ mean, WEIGHT @ WEIGHT.T + NOISE * torch.eye(3))
    return model, exact


def two_level_model(widened: float = 1.0) -> Case:
    prior = ABOVE**2 + WITHIN  # variance of z1 in all
    variance = 1 / (1 / prior + SCALE**2 / NOISE)
    top_variance = 1 / (1 + ABOVE**2 / WITHIN)
    model = HierarchicalVAE(
        statistics_layer(variance[:, None] * WEIGHT.T / NOISE, torch.zeros(2), widened * variance),
        linear(WEIGHT, torch.zeros(3)),
        statistics_layer(torch.diag(top_variance * ABOVE / WITHIN), torch.zeros(2), widened * top_variance),
        statistics_layer(torch.diag(ABOVE), torch.zeros(2), torch.full((2,), WITHIN)),
        torch.zeros(1, 2),
        Linear(),
    )
    exact = torch.distributions.MultivariateNormal(
        torch.zeros(3), WEIGHT @ torch.diag(prior) @ WEIGHT.T + NOISE * torch.eye(3)
    )
    return model, exact


def measured(model: VAE, exact: torch.distributions.MultivariateNormal, group: int, k: int) -> tuple[Tensor, ...]:
    x = exact.mean + torch.linspace(-2, 2, 120).reshape(40, 3)
    found = likelihoods(model, x, torch.full((40,), group), k, STREAMS)
    return exact.log_prob(x).double(), found.elbo, found.importance


@pytest.mark.parametrize(
    ("case", "group"), [(flat_model(0), 0), (flat_model(1), 1), (two_level_model(), 0)], ids=["flat", "shifted", "two"]
)
def test_with_the_exact_posterior_every_weight_is_the_likelihood(case: Case, group: int) -> None:
    """p(x, z) / q(z | x) is p(x) whatever z is, so one sample is enough."""
    truth, _, importance = measured(*case, group, k=1)
    torch.testing.assert_close(importance, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("case", "group", "dimensions"), [(flat_model(1, 1.6), 1, 2), (two_level_model(1.6), 0, 4)])
def test_a_wrong_posterior_costs_the_elbo_more_than_the_importance_weighted_bound(
    case: Case, group: int, dimensions: int
) -> None:
    truth, elbo, few = measured(*case, group, k=8)
    _, _, many = measured(*case, group, k=1000)
    # In one dimension KL(N(m, 1.6 v) || N(m, v)) is (1.6 - 1 - log 1.6) / 2.
    gap = dimensions * (1.6 - 1 - math.log(1.6)) / 2
    assert (truth - elbo).mean().item() == pytest.approx(gap, abs=0.1)
    assert elbo.mean() < few.mean() < many.mean()
    torch.testing.assert_close(many, truth, rtol=0, atol=0.12)


def small_networks(two_levels: bool) -> VAE:
    torch.manual_seed(0)
    encoder, decoder, means = nn.Linear(6, 8), nn.Linear(4, 6), torch.randn(2, 4)
    if not two_levels:
        return VAE(encoder, decoder, means, Bernoulli())
    return HierarchicalVAE(encoder, decoder, nn.Linear(4, 6), nn.Linear(3, 8), means, Bernoulli())


OBJECTIVES: dict[bool, Objective] = {
    False: Elbo(4),
    True: HierarchicalElbo(4, 3, predefined_prior=False, consistency="sampled", second_reconstruction=False),
}


@pytest.mark.parametrize("two_levels", [False, True])
def test_the_elbo_is_what_training_maximises(two_levels: bool) -> None:
    model, objective = small_networks(two_levels), OBJECTIVES[two_levels]
    x, group = torch.rand(5, 6), torch.tensor([0, 1, 0, 1, 1])
    noise = {name: torch.randn(5, *shape) for name, shape in objective.noise.items()}
    batch = Batch(x, torch.zeros(5, dtype=torch.int64), group, torch.ones(5))
    losses = objective(model, Step(batch, noise, {}, RoundContext(1, 1, (0,))))
    found = draw(model, x, group, model.encode(x, group), lambda name, width: noise[name])
    torch.testing.assert_close(found.elbo, -losses.total)
    torch.testing.assert_close(found.reconstruction, losses.terms["nll"])


@pytest.mark.parametrize("two_levels", [False, True])
def test_means_and_log_mean_over_draws_by_hand(two_levels: bool) -> None:
    model, x, group = small_networks(two_levels), torch.rand(3, 6), torch.tensor([1, 0, 1])

    def drawn(step: int) -> Likelihoods:
        def noise(name: str, width: int) -> Tensor:
            return STREAMS.normal(f"likelihood/{name}", 3, width, step=step)

        return draw(model, x, group, model.encode(x, group), noise)

    one, two = drawn(0), drawn(1)
    found = likelihoods(model, x, group, 2, STREAMS)
    torch.testing.assert_close(found.reconstruction, ((one.reconstruction + two.reconstruction) / 2).double())
    torch.testing.assert_close(found.elbo, ((one.elbo + two.elbo) / 2).double())
    weights = torch.stack([one.importance, two.importance]).double().exp().mean(dim=0)
    torch.testing.assert_close(found.importance, weights.log())


def test_an_image_does_not_depend_on_how_many_there_are() -> None:
    model, x = small_networks(False), torch.rand(ROWS + 5, 6)
    group = torch.arange(ROWS + 5) % 2
    whole, part = (likelihoods(model, x[:n], group[:n], 2, STREAMS).importance for n in (ROWS + 5, 300))
    torch.testing.assert_close(whole[:300], part)
    assert torch.equal(codes(model, x, group), model.encode(x, group).mean)
    assert reconstructions(model, x, group).shape == x.shape


def test_units() -> None:
    assert bits_per_dimension(-784 * math.log(2), 784) == pytest.approx(1.0)
    bernoulli, gaussian = (
        VAE(nn.Identity(), nn.Identity(), torch.zeros(1, 1), family) for family in (Bernoulli(), Normal(0.3))
    )
    assert paper_reconstruction(bernoulli, 156.8, 784) == pytest.approx(0.2)
    x, output = torch.rand(1, 12), torch.randn(1, 12)
    nats = gaussian.likelihood.negative_log(x, output).item()
    assert paper_reconstruction(gaussian, nats, 12) == pytest.approx(
        ((x - output.sigmoid()) ** 2).sum().item(), rel=1e-4
    )
