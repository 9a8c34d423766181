"""How likely held-out images are to a VAE, in nats per image: one definition for one level and for two.

The generative model is p(z1) p(x | z1) with p(z1) = N(m_g, I), or p(z2) p(z1 | z2) p(x | z1) with p(z2) = N(0, I);
further terms of a training loss (a second reconstruction, a predefined prior beside a learned one) are no part of it.

    reconstruction   E_q[-log p(x | z1)], the encoder's z1
    elbo             -reconstruction - KL, the divergence from a unit normal in closed form
    importance       log 1/k sum_i p(x, z_i) / q(z_i | x), a bound that k tightens (Burda et al., "Importance Weighted
                     Autoencoders", ICLR 2016); k = 1 is the elbo in expectation
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.evaluation.metric import Metric, Reading, Values
from fedloom.evaluation.needs import AUTOENCODER, SILO_RECORDS
from fedloom.modalities.likelihoods import Normal
from fedloom.models.gaussian import DiagonalGaussian, kl_to_unit
from fedloom.models.vae import VAE, HierarchicalVAE
from fedloom.outline import in_outline
from fedloom.runs.metrics import metric_key
from fedloom.streams import Streams

if TYPE_CHECKING:
    from fedloom.evaluation.evidence import Autoencoder, Evaluation

ROWS = 1000  # images at once; fixed, so that an image's noise does not depend on how many there are

Noise = Callable[[str, int], Tensor]  # (name of a latent, its width) -> standard normal rows


@dataclass(frozen=True, eq=False)
class Likelihoods:
    """One value per image."""

    __repr__ = in_outline

    reconstruction: Tensor  # nats, lower is better
    elbo: Tensor  # nats, higher is better
    importance: Tensor  # nats, higher is better


@torch.no_grad()
def likelihoods(model: VAE, x: Tensor, group: Tensor, samples: int, streams: Streams) -> Likelihoods:
    """Reconstruction and elbo as means over ``samples`` draws, and the importance-weighted bound of all of them."""
    parts = []
    for chunk, (rows, groups) in enumerate(_batches(x, group)):
        posterior = model.encode(rows, groups)
        reconstruction, elbo = torch.zeros(2, len(rows), dtype=torch.float64, device=x.device)
        weights = torch.full((len(rows),), -math.inf, dtype=torch.float64, device=x.device)
        for number in range(samples):

            def noise(name: str, width: int, rows: int = len(rows), chunk: int = chunk, step: int = number) -> Tensor:
                return streams.normal(f"likelihood/{name}", rows, width, round=chunk, step=step, device=x.device)

            drawn = draw(model, rows, groups, posterior, noise)
            reconstruction += drawn.reconstruction / samples
            elbo += drawn.elbo / samples
            weights = torch.logaddexp(weights, drawn.importance.double())
        parts.append(Likelihoods(reconstruction, elbo, weights - math.log(samples)))
    return Likelihoods(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("reconstruction", "elbo", "importance"))
    )


def draw(model: VAE, x: Tensor, group: Tensor, posterior: DiagonalGaussian, noise: Noise) -> Likelihoods:
    """One draw of the latents: ``importance`` is its log weight, log p(x, z) - log q(z | x)."""
    z1 = posterior.sample(noise("z1", posterior.mean.shape[1]))
    reconstruction = model.likelihood.negative_log(x, model.decode(z1, group))
    log_posterior = posterior.log_density(z1)
    if not isinstance(model, HierarchicalVAE):
        prior = _unit(model.prior_mean(group))
        elbo = -reconstruction - kl_to_unit(posterior, prior.mean)
        return Likelihoods(reconstruction, elbo, prior.log_density(z1) - log_posterior - reconstruction)
    top = model.encode_top(z1, group)
    z2 = top.sample(noise("z2", top.mean.shape[1]))
    # Below the top the prior is no unit normal, and its divergence has no closed form over z2.
    within = model.decode_top(z2, group).log_density(z1) - log_posterior
    elbo = -reconstruction + within - kl_to_unit(top, z2.new_zeros(()))
    above = _unit(torch.zeros_like(z2)).log_density(z2) - top.log_density(z2)
    return Likelihoods(reconstruction, elbo, above + within - reconstruction)


def bits_per_dimension(nats: float, dimensions: int) -> float:
    """A log-likelihood in nats per image as bits per value of the image, lower is better."""
    return -nats / (dimensions * math.log(2))


def paper_reconstruction(model: VAE, nats: float, dimensions: int) -> float:
    """What FissionVAE's column "NLL" seems to hold, by its scale; for comparison with its tables only.

    Bernoulli: binary cross-entropy per pixel (Mixed MNIST, 0.2 to 0.3). Gaussian: squared error summed over an image
    (CHARM, 27 to 51), which is the reconstruction NLL without its normalising constant.
    """
    if not isinstance(model.likelihood, Normal):
        return nats / dimensions
    variance = model.likelihood.variance
    return 2 * variance * (nats - 0.5 * math.log(2 * math.pi * variance) * dimensions)


@torch.no_grad()
def reconstructions(model: VAE, x: Tensor, group: Tensor) -> Tensor:
    """The decoder's mean at the encoder's mean, in [0, 1]."""
    return torch.cat(
        [
            model.likelihood.mean(model.decode(model.encode(rows, groups).mean, groups))
            for rows, groups in _batches(x, group)
        ]
    )


@torch.no_grad()
def codes(model: VAE, x: Tensor, group: Tensor) -> Tensor:
    """The posterior's mean for each record, its code where one vector must stand for it."""
    return torch.cat([model.encode(rows, groups).mean for rows, groups in _batches(x, group)])


def _batches(x: Tensor, group: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(x, ROWS), torch.split(group, ROWS), strict=True))


def _unit(mean: Tensor) -> DiagonalGaussian:
    return DiagonalGaussian(mean, torch.zeros_like(mean))


def likelihood(evaluation: Evaluation) -> Values:
    """Reconstruction NLL, ELBO and importance-weighted bound of held-out records."""
    samples, parts = evaluation.config.importance_samples, []
    found: Values = {}
    for vae in evaluation.autoencoders:
        values = likelihoods(vae.model, *vae.inputs(vae.held_out), samples, evaluation.streams)
        found |= _likelihood_values(evaluation, vae, [values], vae.group, vae.silo)
        parts.append(values)
    if (first := evaluation.autoencoders[0]).group:
        found |= _likelihood_values(evaluation, first, parts)
    return found


def _likelihood_values(
    evaluation: Evaluation,
    vae: Autoencoder,
    parts: Sequence[Likelihoods],
    group: str | None = None,
    silo: str | None = None,
) -> Values:
    """The mean of each value over the records of all parts, in every unit."""
    dimensions, draws = vae.held_out.x[0].numel(), f"k{evaluation.config.importance_samples}"
    nll, elbo, importance = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("reconstruction", "elbo", "importance")
    )
    nats = {"nll": nll.mean().item(), "elbo": elbo.mean().item(), "importance": importance.mean().item()}
    values = {
        ("nll", "nats"): nats["nll"],
        ("nll", "paper"): paper_reconstruction(vae.model, nats["nll"], dimensions),
        ("elbo", "nats"): nats["elbo"],
        ("importance-bound", f"nats-{draws}"): nats["importance"],
        ("bits-per-dimension", "elbo"): bits_per_dimension(nats["elbo"], dimensions),
        ("bits-per-dimension", f"importance-bound-{draws}"): bits_per_dimension(nats["importance"], dimensions),
    }
    return {metric_key(*names, len(nll), group, silo): value for names, value in values.items()}


METRIC = Metric(
    "likelihood",
    likelihood,
    (
        Reading("nll/nats", "Reconstruction NLL in nats", better="lower", counts="records"),
        Reading("nll/paper", "Reconstruction NLL on FissionVAE's scale", better="lower", counts="records"),
        Reading("elbo/nats", "ELBO in nats", better="higher", counts="records"),
        Reading("importance-bound/nats-*", "Importance-weighted bound in nats", better="higher", counts="records"),
        Reading("bits-per-dimension/*", "Bits per dimension", better="lower", counts="records"),
    ),
    needs=(SILO_RECORDS, AUTOENCODER),
)
