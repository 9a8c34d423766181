"""How far one example may pull: the bound on its gradient, fixed or found on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedloom.errors import ConfigError


def clip_factors(norms: Tensor, bound: Tensor, mask: Tensor) -> Tensor:
    """What each gradient is multiplied with so that none is longer than ``bound``; ``norms`` must not be too short.

    A gradient that is not finite counts for nothing: otherwise its record could be told from the noise.
    """
    shrink = torch.clamp(bound / norms.clamp_min(torch.finfo(norms.dtype).tiny), max=1.0)
    return torch.where(torch.isfinite(norms), shrink, 0.0) * mask


class Clipping(Protocol):
    """A rule for the bound, which is the mechanism's only state."""

    @property
    def share(self) -> float:
        """The part of the budget that finding the bound takes."""
        ...

    @property
    def problem(self) -> str:
        """Why there is no DP guarantee; empty where there is one."""
        ...

    def start(self) -> Tensor:
        """The bound before the first step."""
        ...

    def bound(self, current: Tensor, norms: Tensor, mask: Tensor) -> Tensor:
        """The bound for a batch with these norms."""
        ...

    def following(self, current: Tensor, below: Tensor) -> Tensor:
        """The bound for the next step, given the (noisy) share of norms below the current one."""
        ...


# Where float32 holds a bound, noise of its size and both over any batch, with digits to spare.
SMALLEST, LARGEST = 1e-6, 1e6


def _bound(field: str, value: float) -> None:
    if not SMALLEST <= value <= LARGEST:
        raise ConfigError(f"{field} is {value:g}; it must lie between {SMALLEST:g} and {LARGEST:g}")


def _positive(field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{field} is {value}; it must be greater than 0 and finite")


def _share(field: str, value: float) -> None:
    if not 0 < value < 1:
        raise ConfigError(f"{field} is {value}; it must lie between 0 and 1")


@dataclass(frozen=True)
class Fixed:
    """A public constant."""

    value: float = 1.0

    def __post_init__(self) -> None:
        _bound("the clip bound", self.value)

    @property
    def share(self) -> float:
        """It costs nothing."""
        return 0.0

    @property
    def problem(self) -> str:
        """None."""
        return ""

    def start(self) -> Tensor:
        """The constant."""
        return torch.tensor(self.value)

    def bound(self, current: Tensor, norms: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002 - depends on no record
        """The constant."""
        return current

    def following(self, current: Tensor, below: Tensor) -> Tensor:  # noqa: ARG002
        """The constant."""
        return current


@dataclass(frozen=True)
class Quantile:
    """Follows a quantile of the norms by noisy counts (Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private
    Learning with Adaptive Clipping", NeurIPS 2021), algorithm 1: C <- C exp(-pace (share below C - target)).
    """

    target: float = 0.5
    initial: float = 1.0
    pace: float = 0.2
    share: float = 0.05

    def __post_init__(self) -> None:
        _share("the clip quantile", self.target)
        _bound("the first clip bound", self.initial)
        _positive("the pace of the clip bound", self.pace)
        _share("the clip quantile's share of the budget", self.share)

    @property
    def problem(self) -> str:
        """None: its counts are noisy and accounted."""
        return ""

    def start(self) -> Tensor:
        """The first guess."""
        return torch.tensor(self.initial)

    def bound(self, current: Tensor, norms: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002 - set by earlier counts
        """What the counts so far led to."""
        return current

    def following(self, current: Tensor, below: Tensor) -> Tensor:
        """One geometric step towards the quantile, within what numbers can hold: gradients may be made to vanish."""
        return (current * torch.exp(-self.pace * (below - self.target))).clamp(SMALLEST, LARGEST)


@dataclass(frozen=True)
class Median:
    """The median norm of each batch, as in ALIGN-FL (Gulati, Gross, Wunder, 2025), for reproduction only."""

    @property
    def share(self) -> float:
        """It is not accounted at all."""
        return 0.0

    @property
    def problem(self) -> str:
        """The bound itself is a private statistic."""
        return "the clip bound is the median of private gradient norms, which is released unaccounted"

    def start(self) -> Tensor:
        """Not used."""
        return torch.tensor(0.0)

    def bound(self, current: Tensor, norms: Tensor, mask: Tensor) -> Tensor:
        """The median over real rows; 0 if there is none."""
        real = torch.where((mask > 0) & torch.isfinite(norms), norms, torch.nan)
        return torch.nan_to_num(real.nanmedian(), nan=0.0).to(current.dtype)

    def following(self, current: Tensor, below: Tensor) -> Tensor:  # noqa: ARG002
        """Not used."""
        return current
