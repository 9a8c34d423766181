"""The discrete normal distribution, and whether whole numbers look like it."""

from __future__ import annotations

import numpy as np
from scipy.stats import chi2


def chances(sigma: float, most: int) -> np.ndarray:
    numbers = np.arange(-most, most + 1)
    weights = np.exp(-(numbers.astype(float) ** 2) / (2 * sigma**2))
    return weights / weights.sum()


def surprise(drawn: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of a chi-square test of whole numbers around 0, rare ones taken together."""
    most = len(expected) // 2
    counts = np.bincount(np.clip(drawn, -most, most) + most, minlength=len(expected)).astype(float)
    often = expected * len(drawn) >= 20
    found = [*counts[often], counts[~often].sum()]
    wanted = [*expected[often] * len(drawn), max(expected[~often].sum() * len(drawn), 1e-9)]
    if wanted[-1] < 20:
        found, wanted = found[:-1], wanted[:-1]
    found, wanted = np.array(found), np.array(wanted)
    return float(chi2.sf(((found - wanted) ** 2 / wanted).sum(), len(wanted) - 1))
