"""Sums in whole numbers, with noise in whole numbers, for secure aggregation: how fine, how much noise, how private.

A silo's sum x, in steps of the grid, becomes floor(x + u) + z: u uniform in [0, 1) for each coordinate, so that
rounding favours no side, and z discrete normal noise (Kairouz, Liu, Steinke, "The Distributed Discrete Gaussian
Mechanism for Federated Learning with Secure Aggregation", ICML 2021). The continuous mechanism bounds what this costs:

1. For every u, one unit moves floor(x + u) by less than its own move plus 1 in each coordinate: ``sensitivity``.
2. Discrete noise of variance s^2 around a whole number c is what comes of normal noise of variance s^2 - r^2 around c,
   each value rounded to the grid at random with weights exp(-distance^2 / 2r^2). Those weights add up to r sqrt(2 pi)
   times 1 +- 2 exp(-2 pi^2 r^2) wherever the value lies (Poisson's summation formula), so the two differ by that factor
   in every coordinate: for r = 2, by 1 +- 10^-33. Rounding at random is processing after the fact: it costs nothing.
3. By the same formula the sum of h silos' noise of variance s^2 each is discrete noise of variance h s^2, up to such a
   factor with r^2 = s^2 / 2, and more than one of 10^-33 where s is at least ``LEAST``.

So the sum is as private as normal noise of variance h s^2 - r^2 at that sensitivity, for any number of coordinates,
with sampling and under composition, up to factors that no accountant in double precision could tell from 1. The noise
is chosen such that this is the noise multiplier that was asked for, and charged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import ConfigError, FedloomError
from fedloom.privacy.discrete_gaussian import FARTHEST, LARGEST, WordSource, discrete_gaussian
from fedloom.privacy.trust import Distributed
from fedloom.secure.words import Integers

SMOOTH = 2.0  # r above
LEAST = 4.0  # standard deviation of one silo's noise, in steps
COARSEST = 0.1  # more noise than without a grid
SLACK = 1e-6  # of sums that are added up in floating point
EXACT = 52  # bits of sums that double precision holds whole


@dataclass(frozen=True)
class SharedSum:
    """A sum over silos, of which each adds a share of the noise: all that is public about it."""

    bits: int  # of the numbers that are summed
    trust: Distributed
    units: int  # of all silos together, each of which adds at most ``bound``
    bound: float
    multiplier: float  # standard deviation of the noise that suffices, in bounds, as it is charged
    size: int  # how many numbers

    def grid(self) -> Grid:
        """The finest grid, of a power of two, on which no sum can overflow."""
        root, rise = math.sqrt(self.size), self.trust.share
        room = (2 ** (self.bits - 1) - 1) / self.trust.silos
        fixed = 2 + FARTHEST * max(rise * (self.multiplier * root + SMOOTH), LEAST)
        each = self.bound * ((1 + SLACK) * self.units / self.trust.silos + FARTHEST * rise * self.multiplier)
        if room <= fixed:
            raise ConfigError(self._too_coarse("no grid at all"))
        exponent = math.floor(math.log2((room - fixed) / each))
        sensitivity = math.ldexp(self.bound, exponent) + root
        wanted = math.hypot(self.multiplier * sensitivity, SMOOTH) * rise
        grid = Grid(self, exponent, sensitivity, max(wanted, LEAST))
        if grid.loss > COARSEST or grid.sigma > LARGEST:
            raise ConfigError(self._too_coarse(f"noise that is larger by {grid.loss:.0%}"))
        return grid

    def _too_coarse(self, what: str) -> str:
        return (
            f"privacy.bits = {self.bits} leaves {what} for a sum of {self.size} numbers over {self.units} records or "
            f"subjects of {self.trust.silos} silos; give more bits, at most {EXACT}"
        )


@dataclass(frozen=True)
class Grid:
    """Steps of 2^-exponent, and each silo's noise on them."""

    sum: SharedSum
    exponent: int
    sensitivity: float  # of a silo's rounded sum to one unit, in steps
    sigma: float  # standard deviation of one silo's noise, in steps

    @property
    def effective(self) -> float:
        """The multiplier of continuous noise that is no more private than the noise of those that suffice."""
        return math.sqrt(self.sum.trust.enough * self.sigma**2 - SMOOTH**2) / self.sensitivity

    @property
    def loss(self) -> float:
        """By how much the noise of those that suffice is larger than continuous noise would have to be."""
        noise = math.sqrt(self.sum.trust.enough) * math.ldexp(self.sigma, -self.exponent)
        return noise / (self.sum.multiplier * self.sum.bound) - 1

    def most(self, units: int) -> int:
        """The largest number that a silo of so many units can come to: no sum of all silos' passes half the ring."""
        reach = math.ldexp(units * self.sum.bound * (1 + SLACK), self.exponent)
        return math.ceil(reach) + 1 + math.floor(FARTHEST * self.sigma)

    def integers(self, total: Tensor, units: int, words: WordSource) -> Integers:
        """A silo's sum over so many units, rounded, with its share of the noise."""
        steps = np.ldexp(total.detach().to(torch.float64).numpy(), self.exponent)
        reach = math.ldexp(units * self.sum.bound * (1 + SLACK), self.exponent)
        if np.isnan(steps).any():
            raise FedloomError("a sum is not a number: it is not sent")
        # Nothing but rounding in floating point makes it larger. To cut it moves two sums no farther apart, and fails
        # for nobody's records.
        steps = np.clip(steps, -reach, reach)
        uniform = np.right_shift(words(steps.size), np.uint64(11)).astype(np.float64) * 2.0**-53
        floor = np.floor(steps)
        rounded = floor + (uniform < steps - floor)
        found: Integers = rounded.astype(np.int64) + discrete_gaussian(self.sigma, steps.size, words)
        return found

    def released(self, total: Mapping[str, Tensor], units: int, words: WordSource) -> dict[str, Tensor]:
        """A silo's sum by name as whole steps, which sums in float64 add up to the last bit."""
        flat = torch.cat([tensor.detach().cpu().flatten().to(torch.float64) for tensor in total.values()])
        values = torch.split(self.values(self.integers(flat, units, words)), [t.numel() for t in total.values()])
        return {name: part.reshape(tensor.shape) for (name, tensor), part in zip(total.items(), values, strict=True)}

    def values(self, integers: Integers) -> Tensor:
        """What whole numbers stand for, to the last bit."""
        return torch.from_numpy(np.ldexp(integers.astype(np.float64), -self.exponent))
