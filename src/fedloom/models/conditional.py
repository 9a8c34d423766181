"""A VAE whose one decoder is told the group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedloom.models.networks import route
from fedloom.models.vae import VAE


class GroupConditionalVAE(VAE):
    """The decoder sees z1 and the group's number, one-hot; everything else is as in the plain VAE."""

    def decode(self, z: Tensor, group: Tensor) -> Tensor:
        """The likelihood's parameters given z and the group."""
        told = functional.one_hot(group, len(self.prior_means)).to(z.dtype)
        return route(self.decoder, torch.cat([z, told], dim=-1), group)
