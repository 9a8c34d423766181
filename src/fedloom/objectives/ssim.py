"""Structural similarity (Wang, Bovik, Sheikh, Simoncelli, "Image quality assessment", 2004)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

WINDOW, SIGMA = 11, 1.5
STABILISER_MEAN, STABILISER_CONTRAST = 0.01**2, 0.03**2


def similarity(a: Tensor, b: Tensor) -> Tensor:
    """SSIM of images in [0, 1], one value per image: the mean over all windows and channels."""
    channels = a.shape[1]
    offset = torch.arange(WINDOW, dtype=a.dtype, device=a.device) - WINDOW // 2
    kernel = torch.exp(-(offset**2) / (2 * SIGMA**2))
    kernel = kernel / kernel.sum()
    window = torch.outer(kernel, kernel).expand(channels, 1, WINDOW, WINDOW)

    # Windows that would reach over an edge are left out, as in the original: there is no padding.
    def local_mean(image: Tensor) -> Tensor:
        return functional.conv2d(image, window, groups=channels)

    mean_a, mean_b = local_mean(a), local_mean(b)
    variance_a, variance_b = local_mean(a * a) - mean_a**2, local_mean(b * b) - mean_b**2
    covariance = local_mean(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + STABILISER_MEAN) / (mean_a**2 + mean_b**2 + STABILISER_MEAN)
    structure = (2 * covariance + STABILISER_CONTRAST) / (variance_a + variance_b + STABILISER_CONTRAST)
    return (luminance * structure).flatten(1).mean(dim=1)


def dissimilarity(a: Tensor, b: Tensor) -> Tensor:
    """1 - SSIM, one value per image."""
    return 1.0 - similarity(a, b)
