"""What trains the flow and the refiner of a VAE, whose own blocks stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fedloom.models.flow import FlowVAE
from fedloom.objectives.base import Losses, Step


@dataclass(frozen=True)
class LatentFlow:
    """|v(z_t, t) - (z - e)|^2 at z_t = (1 - t) e + t z, for z ~ q(z | x), e ~ N(0, I) and t uniform.

    The mean of several draws of e and t for each z: latents are small, and one draw tells little.
    """

    latent: int
    draws: int = 4

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """A latent, and for each draw a place to start from and a time."""
        return {"z1": (self.latent,), "e": (self.draws, self.latent), "time": (self.draws, 1)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example."""
        assert isinstance(model, FlowVAE)
        with torch.no_grad():
            z = model.encode(step.batch.x, step.batch.group).sample(step.noise["z1"]).unsqueeze(1)
        time, start = torch.special.ndtr(step.noise["time"]), step.noise["e"]
        found = model.velocity((1.0 - time) * start + time * z, time, step.batch.group)
        return Losses((found - (z - start)).square().sum(dim=-1).mean(dim=-1), {})


@dataclass(frozen=True)
class Refinement:
    """-log p(x | x_t, t, m) at x_t = (1 - t) (m + scale e) + t x, for the mean image m of a z ~ q(z | x).

    What the refiner puts out is a likelihood's parameters; its mean is then the mean of all x that lead through x_t,
    and (mean - x_t) / (1 - t) the velocity of flow matching.
    """

    latent: int
    shape: tuple[int, ...]  # of an example
    scale: float

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """A latent, what is added to the mean image, and a time."""
        return {"z1": (self.latent,), "e": self.shape, "time": (1,)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example."""
        assert isinstance(model, FlowVAE)
        batch = step.batch
        with torch.no_grad():
            z = model.encode(batch.x, batch.group).sample(step.noise["z1"])
            mean = model.likelihood.mean(model.decode(z, batch.group))
        time = torch.special.ndtr(step.noise["time"])
        share = time.reshape(-1, *[1] * len(self.shape))
        on_the_way = (1.0 - share) * (mean + self.scale * step.noise["e"]) + share * batch.x
        output = model.refined(on_the_way, time, mean, batch.group)
        return Losses(model.likelihood.negative_log(batch.x, output), {})
