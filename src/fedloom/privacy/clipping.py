"""How far one example may pull: the bound on its gradient, fixed or found on the way."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.outline import in_outline


def clip_factors(norms: Tensor, bound: Tensor, mask: Tensor) -> Tensor:
    """What each gradient is multiplied with so that none is longer than ``bound``; ``norms`` must not be too short.

    A gradient that is not finite counts for nothing: otherwise its record could be told from the noise.
    """
    shrink = torch.clamp(bound / norms.clamp_min(torch.finfo(norms.dtype).tiny), max=1.0)
    return torch.where(torch.isfinite(norms), shrink, 0.0) * mask


@dataclass(frozen=True)
class Lengths:
    """How long the gradients of a pass are."""

    __repr__ = in_outline

    norms: Tensor  # (rows,) or (units,)
    mask: Tensor  # 0 where a row is padding
    bound: Tensor  # that the steps so far led to


@dataclass(frozen=True)
class Count:
    """How many gradients of a step were short."""

    __repr__ = in_outline

    below: Tensor  # the (noisy) share of norms within the bound
    bound: Tensor


class Clipping(ABC):
    """A rule for the bound, the mechanism's only state; a bound stays as it is unless the rule says otherwise."""

    share: float = 0.0  # the part of the budget that finding the bound takes
    problem: str = ""  # why there is no DP guarantee; empty where there is one

    @abstractmethod
    def start(self) -> Tensor:
        """The bound before the first step."""

    def bound(self, lengths: Lengths) -> Tensor:
        """The bound for this pass."""
        return lengths.bound

    def following(self, count: Count) -> Tensor:
        """The bound for the next step; asked of rules with a share of the budget."""
        return count.bound


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
class Fixed(Clipping):
    """One bound for all rounds, chosen in public before the run."""

    value: float = 1.0

    def __post_init__(self) -> None:
        _bound("the clip bound", self.value)

    def start(self) -> Tensor:
        """The bound of all steps."""
        return torch.tensor(self.value)


@dataclass(frozen=True)
class Quantile(Clipping):
    """Follows a quantile of the norms by noisy counts (Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private
    Learning with Adaptive Clipping", NeurIPS 2021), algorithm 1: C <- C exp(-pace (share below C - target)).
    """

    target: float = 0.5
    initial: float = 1.0
    pace: float = 0.2
    share: float = 0.05
    floor: float = SMALLEST  # gradients may be made to vanish, and the noise with the bound

    def __post_init__(self) -> None:
        _share("the clip quantile", self.target)
        _bound("the first clip bound", self.initial)
        _bound("the least clip bound", self.floor)
        _positive("the pace of the clip bound", self.pace)
        _share("the clip quantile's share of the budget", self.share)

    def start(self) -> Tensor:
        """The bound of the first step, before any norm has been seen."""
        return torch.tensor(self.initial)

    def bound(self, lengths: Lengths) -> Tensor:
        """Where the steps so far led, also those under a lower floor."""
        return lengths.bound.clamp_min(self.floor)

    def following(self, count: Count) -> Tensor:
        """One geometric step towards the quantile."""
        return (count.bound * torch.exp(-self.pace * (count.below - self.target))).clamp(self.floor, LARGEST)


@dataclass(frozen=True)
class MedianNorm(Clipping):
    """The median norm of each batch, as in ALIGN-FL (Gulati, Gross, Wunder, 2025), for reproduction only."""

    problem = "the clip bound is the median of private gradient norms, which is released unaccounted"

    def start(self) -> Tensor:
        """A placeholder: no pass looks at it."""
        return torch.tensor(0.0)

    def bound(self, lengths: Lengths) -> Tensor:
        """The median over real rows; 0 if there is none."""
        norms = lengths.norms
        real = torch.where((lengths.mask > 0) & torch.isfinite(norms), norms, torch.nan)
        return torch.nan_to_num(real.nanmedian(), nan=0.0).to(lengths.bound.dtype)
