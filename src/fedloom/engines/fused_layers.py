"""Layers in a form that batches well over silos.

Convolutions become matrix products, because a stack of kernels would otherwise become a slow grouped convolution.
With the kernel filled up by zeros to r strides a side, a convolution of stride s is one of stride 1 and side r on the
image cut into s x s tiles; and that is one matrix product over r x r shifted views of the tiles. A transposed
convolution is the same the other way round: one product, then r x r shifted sums. Vmapped, each is one batched product.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Pair = tuple[int, int]


def tiled(kernel: Tensor, stride: Pair) -> tuple[Tensor, Pair]:
    """A kernel (a, b, height, width) as (a, b, r, s, r, s), filled up with zeros, and the r of both directions."""
    sides = (math.ceil(kernel.shape[2] / stride[0]), math.ceil(kernel.shape[3] / stride[1]))
    bottom, right = (r * s - k for r, s, k in zip(sides, stride, kernel.shape[2:], strict=True))
    filled = functional.pad(kernel, (0, right, 0, bottom)) if bottom or right else kernel
    return filled.reshape(*kernel.shape[:2], sides[0], stride[0], sides[1], stride[1]), sides


def convolve(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """What ``functional.conv2d`` computes."""
    batch, channels, height, width = x.shape
    rows, columns = (
        (n + 2 * p - k) // s + 1 for n, p, k, s in zip((height, width), padding, kernel.shape[2:], stride, strict=True)
    )
    taps, (high, wide) = tiled(kernel, stride)
    bottom = (rows - 1 + high) * stride[0] - height - padding[0]
    right = (columns - 1 + wide) * stride[1] - width - padding[1]
    padded = functional.pad(x, (padding[1], right, padding[0], bottom))
    tiles = padded.reshape(batch, channels, rows - 1 + high, stride[0], columns - 1 + wide, stride[1])
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (batch, row, column, channel x tile)
    shifted = [tiles[:, i : i + rows, j : j + columns] for i in range(high) for j in range(wide)]
    patches = torch.cat(shifted, dim=-1)
    matrix = taps.permute(2, 4, 1, 3, 5, 0).reshape(patches.shape[-1], -1)
    output = patches.reshape(-1, patches.shape[-1]) @ matrix
    if bias is not None:
        output = output + bias.to(output.dtype)
    return output.reshape(batch, rows, columns, -1).permute(0, 3, 1, 2)


def convolve_transposed(
    x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, output_padding: Pair
) -> Tensor:
    """What ``functional.conv_transpose2d`` computes."""
    batch, channels, rows, columns = x.shape
    taps, (high, wide) = tiled(kernel, stride)
    matrix = taps.permute(0, 2, 4, 1, 3, 5).reshape(channels, -1)
    tiles = x.permute(0, 2, 3, 1).reshape(-1, channels) @ matrix
    tiles = tiles.reshape(batch, rows, columns, high, wide, -1)
    total: Tensor | None = None
    for i in range(high):
        for j in range(wide):
            moved = functional.pad(tiles[:, :, :, i, j], (0, 0, j, wide - 1 - j, i, high - 1 - i))
            total = moved if total is None else total + moved
    assert total is not None, "a kernel has at least one tap"
    total = total.reshape(batch, rows - 1 + high, columns - 1 + wide, -1, *stride)
    image = total.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    height, width = (
        (n - 1) * s - 2 * p + k + o
        for n, s, p, k, o in zip((rows, columns), stride, padding, kernel.shape[2:], output_padding, strict=True)
    )
    bottom, right = height + padding[0] - image.shape[2], width + padding[1] - image.shape[3]
    image = functional.pad(image, (-padding[1], right, -padding[0], bottom))
    return image if bias is None else image + bias.to(image.dtype).reshape(-1, 1, 1)


class MatrixConv2d(nn.Module):
    """Stands in for a convolution, with the same parameters."""

    def __init__(self, original: nn.Conv2d | nn.ConvTranspose2d) -> None:
        super().__init__()
        self.weight, self.bias = original.weight, original.bias
        self.apply_to: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _computation(original)

    def forward(self, x: Tensor) -> Tensor:
        """The convolution of a batch of images, as matrix products."""
        return self.apply_to(x, self.weight, self.bias)


def _computation(original: nn.Conv2d | nn.ConvTranspose2d) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    stride, padding = _pair(original.stride), _pair(original.padding)
    if isinstance(original, nn.ConvTranspose2d):
        output_padding = _pair(original.output_padding)
        return lambda x, kernel, bias: convolve_transposed(x, kernel, bias, stride, padding, output_padding)
    return lambda x, kernel, bias: convolve(x, kernel, bias, stride, padding)


def _pair(values: object) -> Pair:
    assert isinstance(values, tuple)
    return int(values[0]), int(values[1])


def _plain_convolution(module: nn.Module) -> bool:
    """What is rarer stays as it is."""
    if not isinstance(module, nn.Conv2d | nn.ConvTranspose2d) or isinstance(module.padding, str):
        return False
    return module.groups == 1 and _pair(module.dilation) == (1, 1) and module.padding_mode == "zeros"


class StackedLinear(nn.Module):
    """Stands in for a linear layer, with the same parameters: vmapped, torch's own multiplies biases by one."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = original.weight, original.bias

    def forward(self, x: Tensor) -> Tensor:
        """The linear map of a batch."""
        output = x @ self.weight.t()
        return output if self.bias is None else output + self.bias.to(output.dtype)


class StackedGroupNorm(nn.Module):
    """Stands in for a group norm, with the same parameters: torch's own cannot be vmapped."""

    def __init__(self, original: nn.GroupNorm) -> None:
        super().__init__()
        self.weight, self.bias = original.weight, original.bias
        self.groups, self.eps = original.num_groups, original.eps

    def forward(self, x: Tensor) -> Tensor:
        """A batch with the channels of each group normalised together."""
        grouped = x.reshape(len(x), self.groups, -1)
        normal = functional.layer_norm(grouped, grouped.shape[2:], eps=self.eps).reshape(x.shape)
        if self.weight is None:
            return normal
        per_channel = (-1, *[1] * (x.dim() - 2))
        return normal * self.weight.reshape(per_channel) + self.bias.reshape(per_channel)


def has_convolutions(model: nn.Module) -> bool:
    """Whether a model that has not been rewritten has some."""
    return any(map(_plain_convolution, model.modules()))


def rewritten(model: nn.Module, matrix_convolutions: bool) -> int:
    """Replace layers inside a model; the names of its parameters stay. Returns how many convolutions there were."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.GroupNorm:
                setattr(parent, name, StackedGroupNorm(child))
            elif type(child) is nn.Linear:
                setattr(parent, name, StackedLinear(child))
            elif _plain_convolution(child):
                assert isinstance(child, nn.Conv2d | nn.ConvTranspose2d)
                count += 1
                if matrix_convolutions:
                    setattr(parent, name, MatrixConv2d(child))
    return count
