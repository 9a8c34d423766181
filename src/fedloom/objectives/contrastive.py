"""A term that keeps a silo's latents like those of the received model and unlike those of its own earlier models.

Li, He, Song: "Model-Contrastive Federated Learning" (MOON), CVPR 2021, equation 3, without a projection head; with
several earlier models as in ALIGN-FL (Gulati, Gross, Wunder, 2025, arXiv 2512.13316), section 1.4 of its baselines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from fedloom.models.gaussian import DiagonalGaussian
from fedloom.models.history import RememberingVAE
from fedloom.objectives.base import Losses, Step
from fedloom.objectives.elbo import Elbo

ENCODER = "encoder."


@dataclass(frozen=True)
class Contrastive:
    """elbo - weight * log(e_received / (e_received + e_earlier + ...)), with e = exp(cos(z, z_other) / temperature).

    All latents are single draws. Where a silo has no earlier model the term is zero.
    """

    elbo: Elbo
    weight: float
    temperature: float
    earlier: int  # how many earlier models a silo remembers at most

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """One draw of z for each model: the silo's own, the received one, and each that the silo remembers."""
        latent = self.elbo.latent
        return {**self.elbo.noise, "received": (latent,), "earlier": (self.earlier, latent)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example."""
        assert isinstance(model, RememberingVAE)
        z, losses = self.elbo.evaluated(model, step)
        with torch.no_grad():
            weights = {n.removeprefix(ENCODER): t for n, t in step.received.items() if n.startswith(ENCODER)}
            output = functional_call(model.encoder, weights, (step.batch.x,))
            positive = DiagonalGaussian.of(output).sample(step.noise["received"])
            negatives = [
                DiagonalGaussian.of(encoder(step.batch.x)).sample(step.noise["earlier"][:, number])
                for number, encoder in enumerate(model.history.encoders)
            ]
        towards = functional.cosine_similarity(z, positive) / self.temperature
        away = torch.stack([functional.cosine_similarity(z, negative) for negative in negatives]) / self.temperature
        # Places that hold no model yet are infinitely unlike.
        away = torch.where(model.history.filled.unsqueeze(1) > 0, away, -torch.inf)
        contrast = torch.logsumexp(torch.cat([towards.unsqueeze(0), away]), dim=0) - towards
        return Losses(losses.total + self.weight * contrast, {**losses.terms, "contrast": contrast})
