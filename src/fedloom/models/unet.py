"""A U-shaped network that sees an image on its way from noise to a record and gives its velocity there.

Ho et al., "Denoising Diffusion Probabilistic Models", NeurIPS 2020 (arXiv 2006.11239), appendix B: residual blocks that
are told the time, attention where images are small, and what the way down saw handed over to the way up. Group norm
and no batch norm: no example depends on another, and no running statistics are averaged between domains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.errors import ConfigError
from fedloom.models.convolutional import require_images
from fedloom.models.networks import route_all
from fedloom.models.vae import VAE
from fedloom.outline import in_outline

NORM_GROUPS = 8  # at most; fewer where they do not divide a width
FREQUENCIES = 32  # of the waves by which the network sees the time
FASTEST = 1000.0  # of them
FLOAT, MEGABYTE = 4, 2**20  # bytes
# Times an image at a size that a block down and one up keep for their gradients, those in the middle, and attention.
KEPT_BY_BLOCKS, KEPT_BY_MIDDLE, KEPT_BY_ATTENTION = 20, 8, 6


@dataclass(frozen=True)
class UNetSize:
    """How large a network is."""

    widths: tuple[int, ...]  # channels at each size of the image, which halves from one to the next
    blocks: int  # residual blocks at each size, on the way down as on the way up
    attention: int  # at how many of the smallest sizes there is attention; 0: at none
    dropout: float  # share of the channels that each residual block leaves out in training

    @property
    def told(self) -> int:
        """The width of what all residual blocks are told."""
        return 4 * self.widths[0]

    def attends(self, level: int) -> bool:
        """Whether there is attention at a size, of which 0 is the largest."""
        return level >= len(self.widths) - self.attention

    @property
    def dropped(self) -> int:
        """How many channels dropout decides on for an example."""
        both_ways = 2 * self.blocks * sum(self.widths)
        return both_ways + 2 * self.widths[-1] if self.dropout else 0

    def numbers(self, image: tuple[int, ...]) -> int:
        """How many numbers a training step keeps of an example until its gradient is known, to about a fifth."""
        found = 0
        for level, width in enumerate(self.widths):
            places = (image[1] >> level) * (image[2] >> level)
            attention = places**2 + KEPT_BY_ATTENTION * width * places
            found += self.blocks * (KEPT_BY_BLOCKS * width * places + 2 * attention * self.attends(level))
            if level + 1 == len(self.widths):
                found += KEPT_BY_MIDDLE * width * places + attention * bool(self.attention)
        return found

    def at_once(self, image: tuple[int, ...], draws: int, megabytes: float) -> int:
        """Of how many examples, each drawn so many times, that memory holds what a step keeps; at least one."""
        return max(1, int(megabytes * MEGABYTE / (FLOAT * draws * self.numbers(image))))

    def check(self, image: tuple[int, ...]) -> None:
        """Complain about images that cannot be halved so often."""
        require_images(image)
        halved = 2 ** (len(self.widths) - 1)
        if image[1] % halved or image[2] % halved:
            raise ConfigError(
                f"method.widths = {list(self.widths)} halves images {len(self.widths) - 1} times, which needs sides "
                f"divisible by {halved}; these have {image[1]} x {image[2]} pixels: give data.size, or fewer widths"
            )


@dataclass(frozen=True)
class Guide:
    """What residual blocks know beside the image: of each example a row, and which channels dropout keeps of it."""

    __repr__ = in_outline

    row: Tensor
    kept: Tensor | None  # (examples, channels of all blocks), 0 or 1 / (1 - dropout)


def normalised(channels: int) -> nn.GroupNorm:
    """Group norm in groups of four channels or more: one that is alone would lose what it is told."""
    return nn.GroupNorm(math.gcd(NORM_GROUPS, max(1, channels // 4)), channels)


def still(layer: nn.Conv2d) -> nn.Conv2d:
    """A convolution that gives nothing at first, so that a new network begins with what it is handed."""
    nn.init.zeros_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


class Residual(nn.Module):
    """Two convolutions beside a way past them; between them it is told the time and whatever else is known."""

    def __init__(self, before: int, after: int, told: int, first_dropped: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = normalised(before), nn.Conv2d(before, after, 3, padding=1)
        self.told = nn.Linear(told, after)
        self.norm2, self.conv2 = normalised(after), still(nn.Conv2d(after, after, 3, padding=1))
        self.past = nn.Conv2d(before, after, 1) if before != after else None
        self.dropped = slice(first_dropped, first_dropped + after)

    def forward(self, x: Tensor, guide: Guide) -> Tensor:
        """Images to images of the same size."""
        h = self.conv1(functional.silu(self.norm1(x)))
        h = h + self.told(functional.silu(guide.row))[:, :, None, None].to(h.dtype)
        h = functional.silu(self.norm2(h))
        if guide.kept is not None:
            h = h * guide.kept[:, self.dropped, None, None].to(h.dtype)
        output: Tensor = self.conv2(h) + (x if self.past is None else self.past(x))
        return output


class Attention(nn.Module):
    """Every place looks at every other, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = normalised(channels)
        self.asked, self.said = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.seen = nn.Linear(channels, channels, bias=False)  # the softmax would cancel one
        self.out = nn.Linear(channels, channels)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images to images of the same size."""
        places = self.norm(x).flatten(2).mT
        # Written out: torch's own attention cannot be batched over silos.
        scores = self.asked(places) @ self.seen(places).mT / math.sqrt(x.shape[1])
        found = self.out(scores.softmax(dim=-1).to(places.dtype) @ self.said(places))
        output: Tensor = x + found.mT.reshape(x.shape)
        return output


class Level(nn.Module):
    """The residual blocks at one size, each followed by attention where there is some."""

    def __init__(self, inputs: Sequence[int], width: int, size: UNetSize, attends: bool, first_dropped: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Residual(before, width, size.told, first_dropped + number * width) for number, before in enumerate(inputs)
        )
        self.attention = nn.ModuleList(Attention(width) for _ in inputs if attends)

    def step(self, number: int, x: Tensor, guide: Guide) -> Tensor:
        """Through one of the blocks."""
        x = self.blocks[number](x, guide)
        return self.attention[number](x) if len(self.attention) else x


class WayDown(nn.Module):
    """From an image to ever smaller ones of ever more channels."""

    def __init__(self, channels: int, size: UNetSize) -> None:
        super().__init__()
        widths = size.widths
        self.first = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.levels = nn.ModuleList()
        self.halved = nn.ModuleList()
        dropped = 0
        for number, width in enumerate(widths):
            self.levels.append(Level([width] * size.blocks, width, size, size.attends(number), dropped))
            dropped += size.blocks * width
            if number + 1 < len(widths):
                self.halved.append(nn.Conv2d(width, widths[number + 1], 2, stride=2))

    def forward(self, x: Tensor, guide: Guide) -> tuple[Tensor, ...]:
        """What each residual block saw, from the largest size to the smallest."""
        seen, h = [], self.first(x)
        for number, level in enumerate(self.levels):
            assert isinstance(level, Level)
            for block in range(len(level.blocks)):
                h = level.step(block, h, guide)
                seen.append(h)
            if number < len(self.halved):
                h = self.halved[number](h)
        return tuple(seen)


class Middle(nn.Module):
    """Two residual blocks at the smallest size, with attention between them."""

    def __init__(self, size: UNetSize) -> None:
        super().__init__()
        width, dropped = size.widths[-1], size.blocks * sum(size.widths)
        self.level = Level([width, width], width, size, False, dropped)
        self.attention = Attention(width) if size.attention else None

    def forward(self, x: Tensor, guide: Guide) -> Tensor:
        """Images to images of the same size."""
        x = self.level.step(0, x, guide)
        return self.level.step(1, x if self.attention is None else self.attention(x), guide)


class WayUp(nn.Module):
    """Back to the size of the image, past what the way down saw."""

    def __init__(self, channels: int, size: UNetSize) -> None:
        super().__init__()
        widths, dropped = size.widths, size.blocks * sum(size.widths) + 2 * size.widths[-1]
        self.levels = nn.ModuleList()
        self.doubled = nn.ModuleList()
        for number in reversed(range(len(widths))):
            inputs = [2 * widths[number]] * size.blocks
            self.levels.append(Level(inputs, widths[number], size, size.attends(number), dropped))
            dropped += size.blocks * widths[number]
            if number:
                self.doubled.append(nn.ConvTranspose2d(widths[number], widths[number - 1], 2, stride=2))
        self.norm, self.last = normalised(widths[0]), still(nn.Conv2d(widths[0], channels, 3, padding=1))

    def forward(self, x: Tensor, seen: Sequence[Tensor], guide: Guide) -> Tensor:
        """The smallest images and what was seen on the way down, to images of full size."""
        left = list(seen)
        for number, level in enumerate(self.levels):
            assert isinstance(level, Level)
            for block in range(len(level.blocks)):
                x = level.step(block, torch.cat([x, left.pop().to(x.dtype)], dim=1), guide)
            if number < len(self.doubled):
                x = self.doubled[number](x)
        output: Tensor = self.last(functional.silu(self.norm(x)))
        return output


class Embedding(nn.Module):
    """From time, group and class to the row that residual blocks are told; a class that is not known is none."""

    def __init__(self, size: UNetSize, groups: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2 * FREQUENCIES, size.told), nn.Linear(size.told, size.told)
        self.group = nn.Linear(groups, size.told, bias=False) if groups else None
        self.label = nn.Linear(classes, size.told, bias=False) if classes else None

    def forward(self, time: Tensor, group: Tensor, label: Tensor) -> Tensor:
        """One row for each example."""
        waves = torch.logspace(0.0, math.log10(FASTEST), FREQUENCIES, device=time.device)
        angle = time * waves
        row = self.first(torch.cat([angle.sin(), angle.cos()], dim=-1))
        for layer, known in ((self.group, group), (self.label, label)):
            if layer is not None:
                # Rows of a product and not of a table, which has no rule for the gradients of examples.
                names = torch.arange(layer.weight.shape[1], device=known.device)
                row = row + layer((known.unsqueeze(1) == names).to(row.dtype))
        output: Tensor = self.last(functional.silu(row))
        return output


class VelocityBlocks(nn.Module):
    """Blocks ``embedding``, ``down``, ``middle`` and ``up``: the velocity of an image between noise and record."""

    embedding: nn.Module
    down: nn.Module
    middle: nn.Module
    up: nn.Module

    def velocity(self, x: Tensor, time: Tensor, group: Tensor, label: Tensor, kept: Tensor | None = None) -> Tensor:
        """dx / dt of each image at its time (a column), by the branches of its own group."""
        guide = Guide(route_all(self.embedding, (time, group, label), group), kept)
        seen = route_all(self.down, (x, guide), group)
        lowest = route_all(self.middle, (seen[-1], guide), group)
        found: Tensor = route_all(self.up, (lowest, seen, guide), group)
        return found.float()


class FlowUNet(VelocityBlocks):
    """Those blocks alone."""

    def __init__(self, embedding: nn.Module, down: nn.Module, middle: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.embedding, self.down, self.middle, self.up = embedding, down, middle, up


class CodeFlow(VAE, VelocityBlocks):
    """Those blocks for the codes of a VAE, whose blocks ``encoder`` and ``decoder`` are beside them."""

    def __init__(self, vae: VAE, flow: FlowUNet) -> None:
        super().__init__(vae.encoder, vae.decoder, vae.prior_means, vae.likelihood)
        self.embedding, self.down, self.middle, self.up = flow.embedding, flow.down, flow.middle, flow.up
