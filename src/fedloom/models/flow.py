"""A VAE whose latents, and whose last detail, are carried to where they belong from noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.models.convolutional import require_images
from fedloom.models.networks import mlp, route
from fedloom.models.vae import VAE

FREQUENCIES = 4  # of the waves by which a network sees the time
SIDE = 4  # pixels of a mixer's squares
Solver = Literal["euler", "heun"]


def transported(velocity: Callable[[Tensor, Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """A batch moved from time 0 to time 1 by Euler's method; the velocity is given the times as a column."""
    x = start
    for step in range(steps):
        x = x + velocity(x, torch.full((x.shape[0], 1), step / steps, device=x.device)) / steps
    return x


def transported_twice(velocity: Callable[[Tensor, Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """The same by Heun's method, which looks at both ends of each step; where nothing is beyond, at its start alone."""
    x = start
    for step in range(steps):
        time, after = (torch.full((x.shape[0], 1), (step + i) / steps, device=x.device) for i in range(2))
        slope = velocity(x, time)
        ahead = x + slope / steps
        x = x + (slope + velocity(ahead, after)) / (2 * steps)
    return x


SOLVERS: dict[Solver, Callable[[Callable[[Tensor, Tensor], Tensor], Tensor, int], Tensor]] = {
    "euler": transported,
    "heun": transported_twice,
}


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


class Mixer(nn.Module):
    """From images to images of equal size, in squares that are mixed over places and over channels in turn.

    After Tolstikhin et al., "MLP-Mixer", NeurIPS 2021 (arXiv 2105.01601): linear layers alone, which batch well over
    silos and have rules for the gradients of examples.
    """

    def __init__(self, inputs: int, blocks: int, width: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        require_images(shape)
        self.shape, self.grid = shape, (math.ceil(shape[1] / SIDE), math.ceil(shape[2] / SIDE))
        places = math.prod(self.grid)
        self.first = nn.Linear(inputs * SIDE**2, width)
        self.over_places = nn.ModuleList(nn.Linear(places, places) for _ in range(blocks))
        self.over_channels = nn.ModuleList(mlp([width, 2 * width, width]) for _ in range(blocks))
        self.last = nn.Linear(width, shape[0] * SIDE**2)

    def forward(self, x: Tensor) -> Tensor:
        """Images to images of the same height and width, by mixing over places and over channels in turn."""
        _, height, width = self.shape
        rows, columns = self.grid
        filled = functional.pad(x, (0, columns * SIDE - width, 0, rows * SIDE - height))
        squares = filled.reshape(-1, x.shape[1], rows, SIDE, columns, SIDE).permute(0, 2, 4, 1, 3, 5)
        h = self.first(squares.flatten(3).flatten(1, 2))
        for places, channels in zip(self.over_places, self.over_channels, strict=True):
            h = h + places(functional.relu(h).mT).mT
            h = h + channels(h)
        output: Tensor = self.last(functional.relu(h)).reshape(-1, rows, columns, self.shape[0], SIDE, SIDE)
        return output.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)[:, :, :height, :width]


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
