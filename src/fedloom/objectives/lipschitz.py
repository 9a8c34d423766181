"""Penalties on how far a decoder stretches its latents, beside any objective of a VAE.

Neither gives a privacy guarantee: both are soft, and look only where training happens to look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp

from fedloom.models.vae import VAE
from fedloom.objectives.base import Losses, Objective, Step

SMALL = 1e-7


def stretches(decode: Callable[[Tensor], Tensor], z: Tensor, direction: Tensor, iterations: int) -> Tensor:
    """The largest singular value of each row's Jacobian, by power iteration from ``direction``; never too large."""
    with torch.no_grad():
        for _ in range(iterations):
            direction = direction / direction.norm(dim=1, keepdim=True).clamp_min(SMALL)
            pushed = jvp(decode, (z,), (direction,))[1]
            (direction,) = vjp(decode, z)[1](pushed)
        direction = direction / direction.norm(dim=1, keepdim=True).clamp_min(SMALL)
    pushed = jvp(decode, (z,), (direction,))[1]
    lengths: Tensor = (pushed.flatten(1).square().sum(dim=1) + SMALL**2).sqrt()
    return lengths


def _mean_image(model: VAE, group: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda z: model.likelihood.mean(model.decode(z, group))


class Penalty(Protocol):
    """One value per example, large where the decoder is steep."""

    @property
    def name(self) -> str:
        """As ``model.penalty`` and the log call it."""
        ...

    def noise(self, latent: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The standard normal noise that it needs for an example, by name."""
        ...

    def __call__(self, model: VAE, step: Step) -> Tensor:
        """The penalty of each example of the step's batch."""
        ...


@dataclass(frozen=True)
class WithPenalty:
    """objective + weight * penalty, for any objective of a VAE."""

    objective: Objective
    penalty: Penalty
    weight: float

    @property
    def name(self) -> str:
        """The penalty's, because it is what decides whether examples stay apart."""
        return self.penalty.name

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """The objective's noise, and the penalty's under other names."""
        return {**self.objective.noise, **self.penalty.noise(self.objective.noise["z1"])}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The penalised loss for each example."""
        assert isinstance(model, VAE)
        losses = self.objective(model, step)
        penalty = self.penalty(model, step)
        return Losses(losses.total + self.weight * penalty, {**losses.terms, self.penalty.name: penalty})


@dataclass(frozen=True)
class JacobianPenalty:
    """max(0, s(z) - limit)^2, s the largest singular value of the mean image's Jacobian at a z of the posterior."""

    limit: float = 1.0
    iterations: int = 3
    name: str = "jacobian"

    def noise(self, latent: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """A second z, and where the search for the steepest direction starts."""
        return {"penalty": latent, "direction": latent}

    def __call__(self, model: VAE, step: Step) -> Tensor:
        """Of each example; it reaches the decoder alone."""
        batch = step.batch
        z = model.encode(batch.x, batch.group).sample(step.noise["penalty"]).detach()
        direction = step.noise["direction"][:, : z.shape[1]]
        steepness = stretches(_mean_image(model, batch.group), z, direction, self.iterations)
        return torch.relu(steepness - self.limit).square()


@dataclass(frozen=True)
class AlignPenalty:
    """ALIGN-FL's penalty (Gulati, Gross, Wunder, 2025, equation 6): (|J(z~)^T 1| - 1)^2.

    z~ lies between the latents of two examples of the batch, so it cannot be used under DP-SGD. J^T 1 is the gradient
    of the summed pixels, which may vanish where the decoder is steep: this is no bound on any Lipschitz constant.
    """

    name: str = "align-penalty"

    def noise(self, latent: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """A second z, a place between two of them, and an order of the batch."""
        return {"penalty": latent, "between": (1,), "order": (1,)}

    def __call__(self, model: VAE, step: Step) -> Tensor:
        """Of each example, on its way to another."""
        batch = step.batch
        z = model.encode(batch.x, batch.group).sample(step.noise["penalty"])
        share = torch.special.ndtr(step.noise["between"])  # uniform
        # Rows that are padding come last, so that no other one is sent to them.
        order = torch.where(batch.mask > 0, step.noise["order"][:, 0], torch.inf).argsort()
        between = share * z + (1 - share) * z[order]
        pull = vjp(_mean_image(model, batch.group), between)[1]
        (gradient,) = pull(torch.ones_like(batch.x))
        penalty: Tensor = ((gradient.square().sum(dim=1) + SMALL).sqrt() - 1).square()
        return penalty


PENALTIES: dict[str, Callable[[float], Penalty]] = {
    "jacobian": JacobianPenalty,
    "align-penalty": lambda _: AlignPenalty(),
}
