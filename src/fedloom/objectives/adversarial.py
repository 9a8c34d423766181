"""The two sides of a GAN (Goodfellow et al., "Generative Adversarial Nets", NeurIPS 2014), in nats per example.

softplus(-logit) is the cross-entropy of calling an image real, softplus(logit) that of calling it fake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from fedloom.models.gan import GAN
from fedloom.objectives.base import Losses, Step


@dataclass(frozen=True)
class DiscriminatorLoss:
    """Cross-entropy of each record as real plus that of one fake; the generator is a constant here."""

    latent: int

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """One fake for each record."""
        return {"z1": (self.latent,)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example."""
        assert isinstance(model, GAN)
        batch = step.batch
        with torch.no_grad():
            fake = model.generate(step.noise["z1"], batch.group, batch.mask)
        terms = {
            "real": functional.softplus(-model.judge(batch.x, batch.group, batch.mask)),
            "fake": functional.softplus(model.judge(fake, batch.group, batch.mask)),
        }
        return Losses(terms["real"] + terms["fake"], terms)


@dataclass(frozen=True)
class GeneratorLoss:
    """The non-saturating loss: cross-entropy of each fake as real. No record enters, only how many there are."""

    latent: int

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """One fake for each row of the batch."""
        return {"z1": (self.latent,)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example."""
        assert isinstance(model, GAN)
        group, mask = step.batch.group, step.batch.mask
        fake = model.generate(step.noise["z1"], group, mask)
        return Losses(functional.softplus(-model.judge(fake, group, mask)), {})
