"""Convolutional networks between images and codes that lie on a grid: what is near in an image is near in its code."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fedloom.config import ModelConfig
from fedloom.errors import ConfigError
from fedloom.models.convolutional import downward_layers, halvings, upward_layers

Shape = tuple[int, ...]


def grid_of(latent: int, channels: Sequence[int], shape: Shape) -> Shape:
    """Depth, height and width of a code of ``latent`` numbers, for images that are halved once for each width."""
    height, width = halvings(shape, len(channels))[-1]
    if latent % (height * width):
        raise ConfigError(
            f"model.latent = {latent} fills no grid of {height} x {width} places, to which {len(channels)} "
            f"model.channels halve these images: give a multiple of {height * width}"
        )
    return latent // (height * width), height, width


class ToGrid(nn.Module):
    """From an image to rows of numbers, those of a channel behind each other."""

    def __init__(self, shape: Shape, channels: Sequence[int], depth: int) -> None:
        super().__init__()
        last = nn.Conv2d((shape[0], *channels)[-1], depth, 3, padding=1)
        self.layers = nn.Sequential(*downward_layers(shape, channels), last)

    def forward(self, x: Tensor) -> Tensor:
        """Images to rows."""
        rows: Tensor = self.layers(x).flatten(1)
        return rows


class FromGrid(nn.Module):
    """From such rows to an image."""

    def __init__(self, grid: Shape, channels: Sequence[int], shape: Shape) -> None:
        super().__init__()
        self.grid = grid
        first = nn.Conv2d(grid[0], (shape[0], *channels)[-1], 3, padding=1)
        self.layers = nn.Sequential(first, *upward_layers(channels, shape))

    def forward(self, z: Tensor) -> Tensor:
        """Rows to images."""
        images: Tensor = self.layers(z.reshape(-1, *self.grid))
        return images


def grid_encoder(model: ModelConfig, shape: Shape) -> nn.Module:
    """Convolutions of the widths in ``model.channels``, then mean and log variance of each number of the code."""
    return ToGrid(shape, model.channels, 2 * grid_of(model.latent, model.channels, shape)[0])


def grid_decoder(model: ModelConfig, shape: Shape, inputs: int) -> nn.Module:
    """Transposed convolutions of the encoder's widths in reverse order."""
    if inputs != model.latent:
        raise ConfigError("model.network = 'grid' has no place for what a decoder is told beside a code")
    return FromGrid(grid_of(inputs, model.channels, shape), model.channels, shape)
