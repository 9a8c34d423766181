"""A VAE whose latents, and whose last detail, are carried to where they belong from noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.models.convolutional import KERNEL, STRIDE, halvings, padding
from fedloom.models.networks import mlp, route
from fedloom.models.vae import VAE

FREQUENCIES = 4  # of the waves by which a network sees the time


def transported(velocity: Callable[[Tensor, Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """A batch moved from time 0 to time 1 by Euler's method; the velocity is given the times as a column."""
    x = start
    for step in range(steps):
        x = x + velocity(x, torch.full((x.shape[0], 1), step / steps, device=x.device)) / steps
    return x


class Velocity(nn.Module):
    """Linear layers that see vectors and, in a last column, the time."""

    def __init__(self, width: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.layers = mlp([width + 1 + 2 * FREQUENCIES, *hidden, width])

    def forward(self, x: Tensor) -> Tensor:
        """The velocity of each row."""
        angle = x[..., -1:] * (math.pi * torch.arange(1, FREQUENCIES + 1, device=x.device))
        output: Tensor = self.layers(torch.cat([x, angle.sin(), angle.cos()], dim=-1))
        return output


class UNet(nn.Module):
    """From images to images: halvings of the widths in ``channels``, and back with a shortcut at every size."""

    def __init__(self, inputs: int, channels: Sequence[int], shape: tuple[int, ...]) -> None:
        super().__init__()
        *sizes, _ = halvings(shape, len(channels))
        ways = list(zip(itertools.pairwise((inputs, *channels)), sizes, strict=True))
        self.down = nn.ModuleList(
            nn.Conv2d(before, after, KERNEL, STRIDE, padding(size)[0]) for (before, after), size in ways
        )
        self.middle = nn.Conv2d(channels[-1], channels[-1], 3, padding=1)
        # What comes up from the next smaller size beside what went down to it; from the smallest, what became of it.
        self.mix = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1) for width in channels)
        outputs = (shape[0], *channels[:-1])
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(width, after, KERNEL, STRIDE, *padding(size))
            for width, after, (_, size) in zip(channels, outputs, ways, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply to a batch."""
        seen: list[Tensor] = []
        for down in self.down:
            x = functional.relu(down(x))
            seen.append(x)
        x = functional.relu(self.middle(x))
        for mix, up, beside in reversed(list(zip(self.mix, self.up, seen, strict=True))):
            x = up(functional.relu(mix(torch.cat([functional.relu(x), beside], dim=1))))
        return x


class FlowVAE(VAE):
    """A VAE with two more blocks.

    ``flow`` gives the velocity that carries N(0, I) to the latents of a group; ``refiner``, if there is one, guesses a
    record from a point on the straight way to it from a noisy mean image, the mean image and the time.
    """

    def __init__(self, vae: VAE, flow: nn.Module, refiner: nn.Module | None) -> None:
        super().__init__(vae.encoder, vae.decoder, vae.prior_means, vae.likelihood)
        self.flow = flow
        self.refiner = refiner

    def velocity(self, z: Tensor, time: Tensor, group: Tensor) -> Tensor:
        """dz / dt, by the branch of each row's group."""
        return route(self.flow, torch.cat([z, time], dim=-1), group)

    def refined(self, x: Tensor, time: Tensor, mean: Tensor, group: Tensor) -> Tensor:
        """The likelihood's parameters of the record at the end of the way that leads through ``x``."""
        assert self.refiner is not None
        clock = time.reshape(-1, 1, 1, 1).expand(-1, 1, *x.shape[2:])
        return route(self.refiner, torch.cat([x, mean, clock], dim=1), group)
