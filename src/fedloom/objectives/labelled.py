"""What methods for labelled vectors minimise, one value per example."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.models.gaussian import kl_divergence, kl_to_unit
from fedloom.models.labelled import ClassVAE, ConditionalFlow, ConditionalGAN, ConditionalVAE, LinearHead
from fedloom.objectives.base import Losses, Step


@dataclass(frozen=True)
class ConditionalElbo:
    """|x - mean|^2 / (2 variance) + kl_weight KL(q(z | x, y) || p(z | y)), summed over dimensions: DP-CVAE, equation 1.

    ``reference_batch`` > 0 gives the authors' code instead: the squared error's mean over dimensions beside 0.1 times
    the divergence's SUM over a batch of so many, which makes z carry nothing.
    """

    latent: int
    kl_weight: float = 1.0
    reference_batch: int = 0

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """The draw of z from the encoder's posterior."""
        return {"z": (self.latent,)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example, with the squared error and the divergence in nats."""
        assert isinstance(model, ConditionalVAE)
        batch = step.batch
        posterior = model.encode(batch.x, batch.y)
        squared = (batch.x - model.decode(posterior.sample(step.noise["z"]), batch.y)).square().sum(dim=1)
        divergence = kl_divergence(posterior, model.prior(batch.y))
        if self.reference_batch:
            total = squared / batch.x.shape[1] + 0.1 * self.reference_batch * divergence
        else:
            total = squared / (2.0 * model.variance) + self.kl_weight * divergence
        return Losses(total, {"squared-error": squared, "kl": divergence})


@dataclass(frozen=True)
class ClassElbo:
    """-log p(x | z, y) + kl_weight KL(q(z | x, y) || N(0, I)), z drawn once from q; sums over pixels and latents."""

    latent: int
    kl_weight: float = 1.0

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """The draw of z."""
        return {"z": (self.latent,)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The bound for each example."""
        assert isinstance(model, ClassVAE)
        batch = step.batch
        posterior = model.encode(batch.x, batch.group, batch.y)
        decoded = model.decode(posterior.sample(step.noise["z"]), batch.group, batch.y)
        reconstruction = model.likelihood.negative_log(batch.x, decoded)
        divergence = kl_to_unit(posterior, torch.zeros_like(posterior.mean))
        return Losses(reconstruction + self.kl_weight * divergence, {"nll": reconstruction, "kl": divergence})


def drawn_labels(noise: Tensor, classes: int) -> Tensor:
    """Classes, all alike, from standard normal numbers: drawn by nobody's records."""
    uniform: Tensor = torch.special.ndtr(noise)
    return (uniform * classes).long().clamp(0, classes - 1)


@dataclass(frozen=True)
class ConditionalDreams:
    """-log q(z | x, y) for a y that is drawn, z ~ p(z | y) and x ~ p(x | z, y): an encoder that no record teaches."""

    latent: int
    width: int
    classes: int

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """A label, a latent, and what lies between a vector and its mean."""
        return {"label": (), "z": (self.latent,), "x": (self.width,)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """How unlikely the encoder finds the latent that each example was made from."""
        assert isinstance(model, ConditionalVAE)
        label = drawn_labels(step.noise["label"], self.classes)
        z = model.prior(label).sample(step.noise["z"])
        dreamt = (model.decode(z, label) + math.sqrt(model.variance) * step.noise["x"]).detach()
        return Losses(-model.encode(dreamt, label).log_density(z.detach()), {})


@dataclass(frozen=True)
class ConditionalAdversarial:
    """Binary cross-entropy of a discriminator that sees a record and a fake, or of the generator that makes the fake.

    The fake's label is drawn anew, so that a record adds one term alone.
    """

    plays: Literal["discriminator", "generator"]
    latent: int
    classes: int

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """What the fake is made from: a latent, and a normal number that becomes its label."""
        return {"z": (self.latent,), "label": ()}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example."""
        assert isinstance(model, ConditionalGAN)
        label = drawn_labels(step.noise["label"], self.classes)
        fake = model.generate(step.noise["z"], label)
        if self.plays == "generator":
            return Losses(functional.softplus(-model.judge(fake, label)), {})
        real = functional.softplus(-model.judge(step.batch.x, step.batch.y))
        unmasked = functional.softplus(model.judge(fake.detach(), label))
        return Losses(real + unmasked, {"real": real, "fake": unmasked})


@dataclass(frozen=True)
class FlowMatching:
    """|v(x_t, t, y) - (x - e)|^2 at x_t = (1 - t) e + t x, for e ~ N(0, scale^2 I) and t uniform."""

    width: int
    scale: float

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """A place to start from, and a time."""
        return {"e": (self.width,), "time": (1,)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example, in squares of the scale."""
        assert isinstance(model, ConditionalFlow)
        time, start = torch.special.ndtr(step.noise["time"]), self.scale * step.noise["e"]
        found = model.velocity((1.0 - time) * start + time * step.batch.x, time, step.batch.y)
        return Losses((found - (step.batch.x - start)).square().sum(dim=1) / self.scale**2, {})


@dataclass(frozen=True)
class CrossEntropy:
    """-log p(y | x) of a linear head; ``milestones`` are shares of the rounds after each of which it counts a tenth.

    For plain gradient descent a tenth of the loss is a tenth of the learning rate.
    """

    milestones: tuple[float, ...] = ()
    decay: float = 0.0  # half the squared weights, times this

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """Nothing is drawn: the head sees the records themselves."""
        return {}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example."""
        assert isinstance(model, LinearHead)
        loss = functional.cross_entropy(model.logits(step.batch.x), step.batch.y, reduction="none")
        passed = sum(step.context.round > share * step.context.rounds for share in self.milestones)
        squares = 0.5 * self.decay * model.head.weight.square().sum() if self.decay else 0.0
        return Losses(0.1**passed * (loss + squares), {"cross-entropy": loss})
