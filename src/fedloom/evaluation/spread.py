"""How different samples are from each other: the number that shows a collapsed generator."""

from __future__ import annotations

import math

from torch import Tensor


def spread(samples: Tensor, real: Tensor) -> float:
    """Standard deviation over samples, averaged over pixels, as a share of that of real images.

    0: all samples are alike; 1: as different as real images; not a number where either is not finite.
    """
    value = (_deviation(samples) / _deviation(real)).item()
    return value if math.isfinite(value) else math.nan


def _deviation(images: Tensor) -> Tensor:
    centred = images.double() - images.double().mean(dim=0)
    return centred.square().mean(dim=0).sqrt().mean()
