from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, distributions, nn

from fedloom.engines.optimizers import gradients_of_mean
from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext
from fedloom.modalities.likelihoods import Bernoulli
from fedloom.models.networks import Flat, Routed
from fedloom.models.vae import VAE
from fedloom.objectives.base import Losses, Step
from fedloom.objectives.elbo import Elbo

CONTEXT = RoundContext(1, 1, (0,))


class LinearGaussian:
    """p(x | output) = N(output, variance): unlike the shipped one without a sigmoid, so that a closed form exists."""

    variance = 0.3

    def negative_log(self, x: Tensor, output: Tensor) -> Tensor:
        return -distributions.Normal(output, math.sqrt(self.variance)).log_prob(x).sum(dim=1)

    def mean(self, output: Tensor) -> Tensor:
        return output


def two_group_vae() -> VAE:
    torch.manual_seed(0)
    decoder = Routed({group: Flat((3,), (8,), (6,)) for group in (0, 1)})
    return VAE(Flat((6,), (8,), (6,)), decoder, torch.tensor([[-1.0] * 3, [1.0] * 3]), Bernoulli())


def batch_of_seven(mask: Tensor | None = None) -> tuple[Batch, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, group = torch.rand(7, 6, generator=generator), torch.tensor([0, 1, 1, 0, 0, 1, 0])
    noise = {"z1": torch.randn(7, 3, generator=generator)}
    return Batch(x, torch.zeros(7, dtype=torch.int64), group, torch.ones(7) if mask is None else mask), noise


def evaluate(model: VAE, batch: Batch, noise: dict[str, Tensor], kl_weight: float = 1.0) -> Losses:
    return Elbo(noise["z1"].shape[1], kl_weight)(model, Step(batch, noise, {}, CONTEXT))


def test_it_is_reconstruction_plus_weighted_divergence_from_the_prior_of_the_rows_group() -> None:
    model, (batch, noise) = two_group_vae(), batch_of_seven()
    losses = evaluate(model, batch, noise, kl_weight=0.25)
    mean, log_variance = model.encoder(batch.x).chunk(2, dim=1)
    deviation = torch.exp(0.5 * log_variance)
    z = mean + deviation * noise["z1"]
    for row, group in enumerate(batch.group.tolist()):
        logits = model.decoder.branches[str(group)](z[row : row + 1])  # type: ignore[index, operator, union-attr]
        nll = -distributions.Bernoulli(logits=logits, validate_args=False).log_prob(batch.x[row : row + 1]).sum()
        prior = distributions.Normal(torch.tensor([-1.0, 1.0][group]), 1.0)
        kl = distributions.kl_divergence(distributions.Normal(mean[row], deviation[row]), prior).sum()
        torch.testing.assert_close(losses.terms["nll"][row], nll)
        torch.testing.assert_close(losses.terms["kl"][row], kl)
        torch.testing.assert_close(losses.total[row], nll + 0.25 * kl)


def test_one_value_per_example_that_moves_with_its_example() -> None:
    model, (batch, noise) = two_group_vae(), batch_of_seven()
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    shuffled = Batch(batch.x[order], batch.y[order], batch.group[order], batch.mask[order])
    losses = evaluate(model, batch, noise)
    moved = evaluate(model, shuffled, {"z1": noise["z1"][order]})
    assert losses.total.shape == (7,)
    assert losses.total.unique().numel() == 7
    torch.testing.assert_close(moved.total, losses.total[order])
    for name, term in losses.terms.items():
        torch.testing.assert_close(moved.terms[name], term[order])


def test_a_masked_row_changes_nothing_in_the_gradient() -> None:
    model = two_group_vae()
    batch, noise = batch_of_seven(torch.tensor([1.0, 1, 0, 1, 0, 1, 1]))
    kept = batch.mask.bool()
    parameters = list(model.parameters())
    masked = gradients_of_mean(evaluate(model, batch, noise).total, batch.mask, parameters)
    small = Batch(batch.x[kept], batch.y[kept], batch.group[kept], batch.mask[kept])
    alone = evaluate(model, small, {"z1": noise["z1"][kept]})
    for found, expected in zip(masked, gradients_of_mean(alone.total, small.mask, parameters), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_bound_of_a_linear_gaussian_model_is_its_evidence_at_the_exact_posterior() -> None:
    """z ~ N(m, 1), x | z ~ N(w z + b, s I) in two dimensions: every expectation is known.

    Posterior: v = 1 / (1 + |w|^2 / s), mean = v (m + w (x - b) / s). Evidence: N(x; w m + b, w w^T + s I). The bound
    at the exact posterior equals the evidence on average over z; one draw of z has the variance that the seed shows.
    """
    draws, prior_mean, s = 200_000, 0.7, LinearGaussian.variance
    w, b, x = torch.tensor([0.8, -0.5]), torch.tensor([0.1, 0.2]), torch.tensor([1.1, -0.4])
    variance = 1 / (1 + w.dot(w) / s)
    mean = variance * (prior_mean + w.dot(x - b) / s)
    decoder = nn.Linear(1, 2)
    decoder.load_state_dict({"weight": w.unsqueeze(1), "bias": b})
    encoder = nn.Linear(2, 2)
    encoder.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.stack([mean, torch.log(variance)])})
    model = VAE(encoder, decoder, torch.tensor([[prior_mean]]), LinearGaussian())
    zeros = torch.zeros(draws, dtype=torch.int64)
    noise = {"z1": torch.randn(draws, 1, generator=torch.Generator().manual_seed(2))}
    with torch.no_grad():
        total = evaluate(model, Batch(x.expand(draws, 2), zeros, zeros, torch.ones(draws)), noise).total
    covariance = torch.outer(w, w) + s * torch.eye(2)
    evidence = distributions.MultivariateNormal(w * prior_mean + b, covariance).log_prob(x)
    assert total.mean().item() == pytest.approx(-evidence.item(), abs=4 * total.std().item() / math.sqrt(draws))
    # A wrong posterior pays its divergence from the exact one: here a mean that is off by 1, 1 / (2 v) nats.
    encoder.bias.data[0] += 1.0
    with torch.no_grad():
        worse = evaluate(model, Batch(x.expand(draws, 2), zeros, zeros, torch.ones(draws)), noise).total
    gap = (worse.mean() - total.mean()).item()
    assert gap == pytest.approx(1 / (2 * variance.item()), abs=5 * worse.std().item() / math.sqrt(draws))


def test_the_noise_it_asks_for_is_one_draw_of_the_latent() -> None:
    assert Elbo(latent=5).noise == {"z1": (5,)}
