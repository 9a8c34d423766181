"""Prior means of the groups: where in the latent space each group lies (the covariance is the identity throughout)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.registry import Registry
from fedloom.streams import Streams


@dataclass(frozen=True)
class Prior:
    """A rule that gives every group its prior mean."""

    summary: str
    means: Callable[[int, int, Streams], Tensor]  # (groups, latent size, streams) -> (groups, latent size)
    one_dimension_per_group: bool = False


def _identical(groups: int, latent: int, _: Streams) -> Tensor:
    return torch.zeros(groups, latent)


def _one_hot(groups: int, latent: int, _: Streams) -> Tensor:
    return torch.eye(groups, latent)


def _symmetrical(groups: int, latent: int, _: Streams) -> Tensor:
    levels = [level for level in range(-(groups // 2), groups // 2 + 1) if level != 0 or groups % 2 == 1]
    return torch.tensor(levels, dtype=torch.float32).unsqueeze(1).expand(groups, latent).clone()


def _random(groups: int, latent: int, streams: Streams) -> Tensor:
    return streams.normal("prior", groups, latent)


def _wave(groups: int, latent: int, _: Streams) -> Tensor:
    owner = torch.arange(latent) * groups // latent
    return (owner.unsqueeze(0) == torch.arange(groups).unsqueeze(1)).to(torch.float32)


LEARNABLE = "learnable"

_OWN = {
    "identical": Prior("every group N(0, I)", _identical),
    "one-hot": Prior("1 in the coordinate with the group's number, 0 elsewhere", _one_hot, True),
    "symmetrical": Prior("the same integer in every coordinate: -1, +1 for two groups, -2 to 2 for five", _symmetrical),
    "random": Prior("drawn once from N(0, I), then fixed", _random),
    "wave": Prior("1 in the group's own block of coordinates, 0 elsewhere", _wave, True),
    LEARNABLE: Prior("with two levels only: none is set, p(z1 | z2) is learned in its place", _identical),
}
PRIORS: Registry[Prior] = Registry("prior", "fedloom.priors", Prior, lambda: _OWN)


def prior_means(name: str, groups: int, latent: int, streams: Streams) -> Tensor:
    """The prior mean of each group, shape (groups, latent)."""
    prior = PRIORS.get(name, "method.prior")
    if prior.one_dimension_per_group and latent < groups:
        raise ConfigError(
            f"method.prior = '{name}' gives each of the {groups} groups a latent coordinate of its own, "
            f"but model.latent = {latent}; it must be at least {groups}"
        )
    return prior.means(groups, latent, streams)
