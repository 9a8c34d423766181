"""Tails of distributions, from scipy."""

from __future__ import annotations

from typing import Any

from fedloom.errors import MissingExtraError


def distributions() -> Any:
    """scipy's distributions, or the name of the extra that brings them."""
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"audits need the package '{error.name}'; pip install 'fedloom[privacy]'") from error
    return stats


def proportion_interval(hits: int, trials: int, confidence: float) -> tuple[float, float]:
    """Clopper and Pearson's exact interval for the probability behind so many hits."""
    beta, tail = distributions().beta, (1 - confidence) / 2
    low = float(beta.ppf(tail, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.isf(tail, hits + 1, trials - hits)) if hits < trials else 1.0
    return low, high
