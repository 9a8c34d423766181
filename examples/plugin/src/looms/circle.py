"""A prior: groups on a circle of radius 2 in the first two latent coordinates."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.models.priors import Prior
from fedloom.streams import Streams


def circle(groups: int, latent: int, streams: Streams) -> Tensor:  # noqa: ARG001 - nothing here is random
    """The means of all groups, (groups, latent)."""
    angle = torch.arange(groups) * 2 * torch.pi / groups
    means = torch.zeros(groups, latent)
    means[:, 0], means[:, 1] = 2 * angle.cos(), 2 * angle.sin()
    return means


PRIOR = Prior("groups on a circle in the first two coordinates", circle)
