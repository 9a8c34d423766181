"""Convolutional networks for images of any size: halved on the way in, doubled on the way out.

No batch norm of their own: its statistics would be of groups whose images differ, and each example would depend on the
others in its batch, which rules out a bound per example. A network may be lent norms from outside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fedloom.config import ModelConfig
from fedloom.errors import ConfigError

Size = tuple[int, int]
KERNEL, STRIDE = 4, 2  # the stride divides the kernel, so that transposed convolutions leave no checkerboard


def require_images(shape: tuple[int, ...]) -> None:
    """Complain about records that have no height and width."""
    if len(shape) != 3:
        raise ConfigError(
            f"convolutional networks need images of shape (channels, height, width); these records have shape {shape}"
        )


def halvings(shape: tuple[int, ...], count: int) -> list[Size]:
    """Height and width of an image and of each of ``count`` halvings, rounded up."""
    require_images(shape)
    return [(math.ceil(shape[1] / STRIDE**i), math.ceil(shape[2] / STRIDE**i)) for i in range(count + 1)]


def padding(size: Size) -> tuple[Size, Size]:
    """Padding and output padding of the convolution whose larger side has that size.

    With kernel 4 and stride 2 a padding of 1 (2 for an odd side) takes n to ceil(n / 2), and the transposed
    convolution with an output padding of 0 (1 for an odd side) takes that exactly back to n.
    """
    height, width = size[0] % 2, size[1] % 2
    return (1 + height, 1 + width), (height, width)


Between = Callable[[int], list[nn.Module]]  # the layers that follow a convolution of so many channels
Chain = Callable[[list[nn.Module]], nn.Module]  # how layers are called: one after the other, or with what is lent


def relu(_: int) -> list[nn.Module]:
    """What follows a convolution: the rectifier, without normalisation."""
    return [nn.ReLU()]


def downward_layers(shape: tuple[int, ...], channels: Sequence[int], between: Between = relu) -> list[nn.Module]:
    """A convolution of stride 2 for each width, and what follows it."""
    layers: list[nn.Module] = []
    *sizes, _ = halvings(shape, len(channels))
    for size, (before, after) in zip(sizes, itertools.pairwise((shape[0], *channels)), strict=True):
        layers += [nn.Conv2d(before, after, KERNEL, STRIDE, padding(size)[0]), *between(after)]
    return layers


def upward_layers(channels: Sequence[int], shape: tuple[int, ...], between: Between = relu) -> list[nn.Module]:
    """Transposed convolutions through the same sizes in reverse."""
    layers: list[nn.Module] = []
    *sizes, _ = halvings(shape, len(channels))
    for size, (before, after) in zip(reversed(sizes), itertools.pairwise((*channels[::-1], shape[0])), strict=True):
        layers += [*between(before), nn.ConvTranspose2d(before, after, KERNEL, STRIDE, *padding(size))]
    return layers


def one_after_the_other(layers: list[nn.Module]) -> nn.Module:
    """The usual chain."""
    return nn.Sequential(*layers)


class Downwards(nn.Module):
    """From an image to numbers: a convolution of stride 2 for each width in ``channels``, then a linear layer."""

    def __init__(
        self,
        shape: tuple[int, ...],
        channels: Sequence[int],
        outputs: int,
        between: Between = relu,
        chain: Chain = one_after_the_other,
    ) -> None:
        super().__init__()
        self.layers = chain(downward_layers(shape, channels, between))
        grid = halvings(shape, len(channels))[-1]
        self.last = nn.Linear((shape[0], *channels)[-1] * math.prod(grid), outputs)

    def forward(self, x: Tensor, *lent: Any) -> Tensor:
        """Images to rows of numbers."""
        output: Tensor = self.last(self.layers(x, *lent).flatten(1))
        return output


class Upwards(nn.Module):
    """From numbers to an image, :class:`Downwards` in reverse: a linear layer, then transposed convolutions.

    The linear layer is itself a transposed convolution, of a single point with a kernel as large as the first grid.
    """

    def __init__(
        self,
        inputs: int,
        channels: Sequence[int],
        shape: tuple[int, ...],
        between: Between = relu,
        chain: Chain = one_after_the_other,
    ) -> None:
        super().__init__()
        self.grid = ((shape[0], *channels)[-1], *halvings(shape, len(channels))[-1])
        self.first = nn.Linear(inputs, math.prod(self.grid))
        self.layers = chain(upward_layers(channels, shape, between))

    def forward(self, z: Tensor, *lent: Any) -> Tensor:
        """Rows of numbers to images."""
        output: Tensor = self.layers(self.first(z).reshape(-1, *self.grid), *lent)
        return output


def conv_encoder(model: ModelConfig, shape: tuple[int, ...]) -> nn.Module:
    """Convolutions of the widths in ``model.channels``, then mean and log variance side by side."""
    return Downwards(shape, model.channels, 2 * model.latent)


def conv_decoder(model: ModelConfig, shape: tuple[int, ...], inputs: int) -> nn.Module:
    """Transposed convolutions of the encoder's widths in reverse order."""
    return Upwards(inputs, model.channels, shape)
