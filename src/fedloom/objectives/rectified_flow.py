"""What trains the velocity of images on their way from noise to a record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedloom.models.unet import CodeFlow, VelocityBlocks
from fedloom.objectives.base import Losses, Step

PathName = Literal["straight", "arc"]
Times = Literal["uniform", "logit-normal"]
Weight = Literal["velocity", "record", "noise"]


@dataclass(frozen=True)
class Path:
    """x_t = noise(t) e + record(t) x, and what its derivative has of each."""

    summary: str
    noise: Callable[[Tensor], Tensor]
    record: Callable[[Tensor], Tensor]
    noise_slope: Callable[[Tensor], Tensor]
    record_slope: Callable[[Tensor], Tensor]


HALF = math.pi / 2
PATHS: dict[PathName, Path] = {
    "straight": Path("(1 - t) e + t x", lambda t: 1.0 - t, lambda t: t, lambda t: -torch.ones_like(t), torch.ones_like),
    "arc": Path(
        "cos(pi t / 2) e + sin(pi t / 2) x",
        lambda t: torch.cos(HALF * t),
        lambda t: torch.sin(HALF * t),
        lambda t: -HALF * torch.sin(HALF * t),
        lambda t: HALF * torch.cos(HALF * t),
    ),
}
# Of the squared error of the velocity: as it is, or on a straight path that of the record, or of the noise, it implies.
WEIGHTS: dict[Weight, Callable[[Tensor], Tensor]] = {
    "velocity": torch.ones_like,
    "record": lambda t: (1.0 - t).square(),
    "noise": torch.square,
}
# From a standard normal number to a time.
TIMES: dict[Times, Callable[[Tensor], Tensor]] = {"uniform": torch.special.ndtr, "logit-normal": torch.sigmoid}


def moved(x: Tensor, shift: Tensor) -> Tensor:
    """Each image by its own whole numbers of pixels down and to the right; its border is repeated."""
    height, width = x.shape[-2:]
    rows = (torch.arange(height, device=x.device) - shift[:, :1]).clamp(0, height - 1)
    columns = (torch.arange(width, device=x.device) - shift[:, 1:]).clamp(0, width - 1)
    x = x.gather(2, rows[:, None, :, None].expand(x.shape))
    return x.gather(3, columns[:, None, None, :].expand(x.shape))


@dataclass(frozen=True)
class Augmentation:
    """What a record may look like instead, drawn for each record by itself."""

    flips: bool = False  # left and right, half of the time
    shifts: int = 0  # at most so many pixels in each direction

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """A coin, and two whole numbers."""
        return ({"flip": ()} if self.flips else {}) | ({"shift": (2,)} if self.shifts else {})

    def __call__(self, x: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
        """Images of the same shape."""
        if self.flips:
            x = torch.where((noise["flip"] > 0)[:, None, None, None], x.flip(-1), x)
        if self.shifts:
            places = 2 * self.shifts + 1
            x = moved(x, (torch.special.ndtr(noise["shift"]) * places).long().clamp(max=places - 1) - self.shifts)
        return x


@dataclass(frozen=True)
class RectifiedFlow:
    """w(t) |v(x_t, t) - dx_t/dt|^2 on a path from e ~ N(0, I) to a record, for a time that is drawn.

    The mean of ``draws`` of them for each record (noise multiplicity: Dockhorn et al., "Differentially Private
    Diffusion Models", TMLR 2023, arXiv 2210.09929, equation 5): under DP-SGD they are parts of one clipped gradient.
    """

    image: tuple[int, ...]
    classes: int = 0  # that the network is told; one more stands for no class
    path: PathName = "straight"
    times: Times = "uniform"
    weight: Weight = "velocity"
    draws: int = 1
    unlabelled: float = 0.0  # share of the records whose class is kept from the network
    augmentation: Augmentation = Augmentation()
    dropped: int = 0  # channels that dropout decides on
    dropout: float = 0.0

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """A place to start from and a time for each draw, and what else a record needs."""
        found = {"e": (self.draws, *self.image), "time": (self.draws, 1), **self.augmentation.noise}
        found |= {"unlabelled": ()} if self.classes and self.unlabelled else {}
        return found | ({"dropout": (self.draws, self.dropped)} if self.dropped else {})

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example."""
        assert isinstance(model, VelocityBlocks)
        return self.towards(self.augmentation(centred(step.batch.x), step.noise), model, step)

    def towards(self, x: Tensor, model: VelocityBlocks, step: Step) -> Losses:
        """The same for ways that end at x."""
        batch, noise, path = step.batch, step.noise, PATHS[self.path]
        label = self._told(batch.y, noise)
        losses = []
        for draw in range(self.draws):  # one after the other, so that each row of a layer belongs to one example
            time, start = TIMES[self.times](noise["time"][:, draw]), noise["e"][:, draw]
            t = time[:, :, None, None]
            kept = self._kept(noise["dropout"][:, draw]) if self.dropped else None
            found = model.velocity(path.noise(t) * start + path.record(t) * x, time, batch.group, label, kept)
            wanted = path.noise_slope(t) * start + path.record_slope(t) * x
            losses.append(WEIGHTS[self.weight](time).squeeze(1) * (found - wanted).square().flatten(1).sum(dim=1))
        return Losses(torch.stack(losses).mean(dim=0), {})

    def _told(self, label: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
        """The class, or the one that stands for none: of records without one, and of some others."""
        hidden = label < 0
        if "unlabelled" in noise:
            hidden = hidden | (torch.special.ndtr(noise["unlabelled"]) < self.unlabelled)
        told: Tensor = torch.where(hidden, self.classes, label)
        return told

    def _kept(self, noise: Tensor) -> Tensor:
        kept: Tensor = torch.special.ndtr(noise) >= self.dropout
        return kept.float() / (1.0 - self.dropout)


@dataclass(frozen=True)
class OfCodes:
    """The same for a code of each record, drawn by an encoder that learns nothing from it.

    Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models", CVPR 2022 (arXiv 2112.10752),
    equation 2, with a flow in the place of diffusion.
    """

    flow: RectifiedFlow  # of images of the shape of a code

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """What the flow needs, and what the code is drawn by."""
        return {**self.flow.noise, "z1": (math.prod(self.flow.image),)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example."""
        assert isinstance(model, CodeFlow)
        with torch.no_grad():
            x = self.flow.augmentation(step.batch.x, step.noise)
            code = model.encode(x, step.batch.group).sample(step.noise["z1"])
        return self.flow.towards(code.reshape(-1, *self.flow.image), model, step)


@dataclass(frozen=True)
class Straightened:
    """|v((1 - t) e + t z, t) - (z - e)|^2 on pairs of noise e and the end z to which a flow carries it.

    Liu et al., "Flow Straight and Fast", ICLR 2023 (arXiv 2209.03003), section 2.2: the ways of a flow that is trained
    on its own pairs are straighter, so that fewer steps follow them. A row of a batch is a pair, one behind the other.
    """

    classes: int = 0  # that the network is told; one more stands for no class

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """A time."""
        return {"time": (1,)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each pair."""
        assert isinstance(model, VelocityBlocks)
        (start, end), time = step.batch.x.chunk(2, dim=1), TIMES["uniform"](step.noise["time"])
        t = time[:, :, None, None]
        label = torch.where(step.batch.y < 0, self.classes, step.batch.y)
        found = model.velocity((1.0 - t) * start + t * end, time, step.batch.group, label)
        return Losses((found - (end - start)).square().flatten(1).sum(dim=1), {})


def centred(x: Tensor) -> Tensor:
    """Pixels from -1 to 1."""
    return 2.0 * x - 1.0


def pixels(x: Tensor) -> Tensor:
    """The way back, for images that left the range as well."""
    return ((x + 1.0) / 2.0).clamp(0.0, 1.0)
