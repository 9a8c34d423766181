"""The negative evidence lower bound of a VAE with group priors (FissionVAE, equation 1 and section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedloom.models.gaussian import kl_to_unit
from fedloom.models.vae import VAE
from fedloom.objectives.base import Losses, Step


@dataclass(frozen=True)
class Elbo:
    """-log p(x | z) + kl_weight * KL(q(z | x) || N(m_g, I)), z drawn once from q; sums over pixels and latents."""

    latent: int
    kl_weight: float = 1.0

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """One draw for z1, the only latent of a VAE with one level."""
        return {"z1": (self.latent,)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The bound for each example."""
        assert isinstance(model, VAE)
        return self.evaluated(model, step)[1]

    def evaluated(self, model: VAE, step: Step) -> tuple[Tensor, Losses]:
        """The z that was drawn, and the bound."""
        batch = step.batch
        posterior = model.encode(batch.x, batch.group)
        z = posterior.sample(step.noise["z1"])
        reconstruction = model.likelihood.negative_log(batch.x, model.decode(z, batch.group))
        divergence = kl_to_unit(posterior, model.prior_mean(batch.group))
        losses = Losses(reconstruction + self.kl_weight * divergence, {"nll": reconstruction, "kl": divergence})
        return z, losses
