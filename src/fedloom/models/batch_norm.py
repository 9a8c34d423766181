"""Batch norm (Ioffe, Szegedy, "Batch Normalization", ICML 2015) that lies outside the network which it normalises.

So a sharing plan can say whose it is: in a block of scope SILO it stays where it is (Li et al., "FedBN", ICLR 2021,
arXiv 2102.07623). It keeps no running statistics, and rows that only fill up a batch do not count.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

EPSILON = 1e-5
Lent = Callable[[int, Tensor], Tensor]  # the norm of a number, of these values


class MaskedBatchNorm(nn.Module):
    """Each channel with the mean 0 and the variance 1 over those rows that count, then scaled and shifted."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Images, and 1 for each that counts."""
        share = (mask / mask.sum()).reshape(-1, 1, 1, 1)  # float32, whatever the images are in
        centred = x - (share * x).mean(dim=(2, 3), keepdim=True).sum(dim=0)
        variance = (share * centred.square()).mean(dim=(2, 3), keepdim=True).sum(dim=0)
        normal = centred * torch.rsqrt(variance + EPSILON)
        return normal * self.weight.reshape(-1, 1, 1) + self.bias.reshape(-1, 1, 1)


class BatchNorms(nn.Module):
    """The norms of a network, which is lent them by their numbers."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(map(MaskedBatchNorm, channels))

    def forward(self, number: int, x: Tensor, mask: Tensor) -> Tensor:
        """One of them."""
        normal: Tensor = self.norms[number](x, mask)
        return normal


class Hole(nn.Module):
    """Where in a network a norm goes that is lent to it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Normed(nn.ModuleList):
    """Layers one after the other, with what is lent in their holes; a shift before a norm would come to nothing."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__(layers)
        for layer, following in itertools.pairwise(layers):
            if isinstance(following, Hole):
                layer.register_parameter("bias", None)

    def forward(self, x: Tensor, lent: Lent) -> Tensor:
        """Through all of them."""
        for layer in self:
            x = lent(layer.number, x) if isinstance(layer, Hole) else cast("Tensor", layer(x))
        return x
