"""How likely a record is given what a decoder puts out, in nats, one value per example."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Likelihood(Protocol):
    """A family p(x | output)."""

    @property
    def steepness(self) -> float:
        """How far the mean moves at most, as a multiple of how far the output does."""
        ...

    @property
    def bounds(self) -> tuple[float, float]:
        """What the values of a record lie between; others have no likelihood, or one that no mean comes near."""
        ...

    def negative_log(self, x: Tensor, output: Tensor) -> Tensor:
        """-log p(x | output), summed over everything but the batch."""
        ...

    def mean(self, output: Tensor) -> Tensor:
        """The expected record, as models see it."""
        ...

    def sample(self, mean: Tensor, noise: Tensor) -> Tensor:
        """A record drawn around its mean, from standard normal noise of the same shape."""
        ...


@dataclass(frozen=True)
class Bernoulli:
    """Each pixel is a coin whose logit the decoder gives (binary cross-entropy for grey values)."""

    steepness: ClassVar[float] = 0.25  # of the sigmoid, at 0
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def negative_log(self, x: Tensor, output: Tensor) -> Tensor:
        """Binary cross-entropy, summed over the pixels."""
        # log(1 + exp(o)) - x o: torch's own function of logits falls apart into a dozen passes when it is vmapped.
        return (functional.softplus(output) - x * output).flatten(1).sum(dim=1)

    def mean(self, output: Tensor) -> Tensor:
        """The coin's probability."""
        return torch.sigmoid(output)

    def sample(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Black or white pixels."""
        uniform: Tensor = torch.special.ndtr(noise)
        return (uniform < mean).to(mean.dtype)


@dataclass(frozen=True)
class Normal:
    """Each pixel is normal around the sigmoid of the output; variance 1/2 gives the squared error, up to a constant."""

    steepness: ClassVar[float] = 0.25
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)  # of the sigmoid
    variance: float = 0.5

    def negative_log(self, x: Tensor, output: Tensor) -> Tensor:
        """Squared error over twice the variance, with the normalising constant."""
        squared = ((x - torch.sigmoid(output)) ** 2).flatten(1).sum(dim=1)
        constant = 0.5 * math.log(2 * math.pi * self.variance) * x[0].numel()
        return squared / (2 * self.variance) + constant

    def mean(self, output: Tensor) -> Tensor:
        """The centre of the normal."""
        return torch.sigmoid(output)

    def sample(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Normal pixels, which may lie outside [0, 1]."""
        return mean + math.sqrt(self.variance) * noise


LIKELIHOODS: dict[str, Callable[[float], Likelihood]] = {
    "bernoulli": lambda _: Bernoulli(),
    "gaussian": Normal,
}  # of images and vectors, given the variance
