"""Probabilistic principal components: a VAE whose decoder is linear, so that its posterior needs no encoder.

Tipping, Bishop: "Probabilistic Principal Component Analysis", Journal of the Royal Statistical Society B, 1999. With
z ~ N(m, I) and x ~ N(W z + b, s I): z | x ~ N(m + P W'(x - b - W m) / s, P) where P = (I + W'W / s)^-1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.modalities.likelihoods import Normal
from fedloom.models.gaussian import DiagonalGaussian
from fedloom.models.networks import Routed
from fedloom.models.vae import VAE
from fedloom.outline import in_outline


@dataclass(frozen=True)
class LinearGaussian(Normal):
    """Each number is normal around the output itself."""

    steepness: ClassVar[float] = 1.0
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    def negative_log(self, x: Tensor, output: Tensor) -> Tensor:
        """Squared error over twice the variance, with the normalising constant."""
        squared = ((x - output) ** 2).flatten(1).sum(dim=1)
        return squared / (2 * self.variance) + 0.5 * math.log(2 * math.pi * self.variance) * x[0].numel()

    def mean(self, output: Tensor) -> Tensor:
        """The output, which may lie outside [0, 1]."""
        return output


@dataclass(frozen=True)
class Posterior:
    """N(mean, covariance) for each row, and the evidence -log p(x)."""

    __repr__ = in_outline

    mean: Tensor  # (n, k)
    covariance: Tensor  # (k, k), the same for all rows
    surprise: Tensor  # (n,)


class LinearVAE(VAE):
    """A single block ``decoder``, one linear layer for each group where it has branches."""

    def __init__(self, decoder: nn.Module, prior_means: Tensor, variance: float) -> None:
        super().__init__(nn.Identity(), decoder, prior_means, LinearGaussian(variance))
        self.variance = variance
        for branch in self._branches().values():
            if [type(layer) for layer in _layers(branch)] != [nn.Linear]:
                raise ConfigError(
                    "model.posterior = 'closed-form' needs a linear decoder: model.network = 'mlp', model.hidden = []"
                )

    def encode(self, x: Tensor, group: Tensor) -> DiagonalGaussian:
        """The exact posterior's mean and variances; its correlations are left out."""
        found = {number: self._posterior(branch, x, group) for number, branch in self._branches().items()}
        means = _own({number: each.mean for number, each in found.items()}, group)
        spread = {n: each.covariance.diagonal().log().expand_as(each.mean) for n, each in found.items()}
        return DiagonalGaussian(means, _own(spread, group))

    def surprise(self, x: Tensor, group: Tensor) -> Tensor:
        """-log p(x) for each row, exactly: what no bound on it can be below."""
        found = {n: self._posterior(branch, x, group).surprise for n, branch in self._branches().items()}
        return _own(found, group)

    def _branches(self) -> dict[int, nn.Module]:
        """By group; a decoder without branches stands alone."""
        if isinstance(self.decoder, Routed):
            return {int(name): branch for name, branch in self.decoder.branches.items()}
        return {0: self.decoder}

    def _posterior(self, branch: nn.Module, x: Tensor, group: Tensor) -> Posterior:
        (layer,), mean = _layers(branch), self.prior_mean(group)
        weight, bias = cast("Tensor", layer.weight), cast("Tensor", layer.bias)
        residual = x.flatten(1) - bias - mean @ weight.mT
        identity = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        precision = identity + weight.mT @ weight / self.variance
        # Identity plus a square is positive definite; to check it would make a GPU wait, which no recording survives.
        factor = torch.linalg.cholesky_ex(precision).L
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        covariance = inverse.mT @ inverse
        projected = residual @ weight / self.variance
        shift = projected @ covariance
        squared = residual.square().sum(dim=1) / self.variance - (projected * shift).sum(dim=1)
        constant = residual.shape[1] * math.log(2 * math.pi * self.variance)
        determinant = 2 * factor.diagonal().log().sum()
        return Posterior(mean + shift, covariance, 0.5 * (squared + determinant + constant))


def _layers(branch: nn.Module) -> list[nn.Module]:
    """What a network is made of."""
    return [module for module in branch.modules() if not list(module.children())]


def _own(by_group: dict[int, Tensor], group: Tensor) -> Tensor:
    """Each row from the branch of its own group, or from the only one."""
    result: Tensor | None = None
    for number, rows in by_group.items():
        own = (group == number).reshape(-1, *[1] * (rows.dim() - 1))
        result = rows if result is None else torch.where(own, rows, result)
    assert result is not None, "a decoder has at least one branch"
    return result
