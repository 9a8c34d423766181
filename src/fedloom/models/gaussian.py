"""Diagonal Gaussians, and the divergences between them, one value per example."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.outline import in_outline


@dataclass(frozen=True)
class DiagonalGaussian:
    """N(mean, diag(exp(log_variance))) for each row."""

    __repr__ = in_outline

    mean: Tensor  # (n, k)
    log_variance: Tensor  # (n, k)

    @classmethod
    def of(cls, statistics: Tensor) -> DiagonalGaussian:
        """From mean and log variance side by side, as encoders put them out."""
        mean, log_variance = statistics.chunk(2, dim=-1)
        return cls(mean, log_variance)

    def sample(self, noise: Tensor) -> Tensor:
        """Reparameterised: mean + standard deviation * noise; of wider noise, the first columns."""
        return self.mean + torch.exp(0.5 * self.log_variance) * noise[..., : self.mean.shape[-1]]

    def log_density(self, z: Tensor) -> Tensor:
        """Log density at ``z``, summed over the dimensions."""
        squared = (z - self.mean) ** 2 * torch.exp(-self.log_variance)
        return -0.5 * (squared + self.log_variance + math.log(2 * math.pi)).sum(dim=-1)


def kl_divergence(q: DiagonalGaussian, p: DiagonalGaussian) -> Tensor:
    """KL(q || p) = 1/2 sum[log(vp/vq) + (vq + (mq - mp)^2) / vp - 1]."""
    difference = q.log_variance - p.log_variance
    squared = (q.mean - p.mean) ** 2 * torch.exp(-p.log_variance)
    return 0.5 * (torch.exp(difference) + squared - 1.0 - difference).sum(dim=-1)


def kl_to_unit(q: DiagonalGaussian, mean: Tensor) -> Tensor:
    """KL(q || N(mean, I)) = 1/2 sum[vq + (mq - mean)^2 - 1 - log vq]; FissionVAE's equation 1 for means -1 and +1."""
    return 0.5 * (torch.exp(q.log_variance) + (q.mean - mean) ** 2 - 1.0 - q.log_variance).sum(dim=-1)
