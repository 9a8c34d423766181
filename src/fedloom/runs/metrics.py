"""Metric keys as people read them: which are metrics, whose they are, and which way is better."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

TRAINING = "train/"  # loss terms, which are no metrics

# Which way is better; a metric that is not named here has no winner.
HIGHER = {
    "domain-hit",
    "class-coverage",
    "precision",
    "recall",
    "density",
    "coverage",
    "inception-score",
    "elbo",
    "importance-bound",
    "probe",
    "utility",
}
LOWER = {"blend", "frechet", "frechet-reconstruction", "kernel", "nll", "bits-per-dimension", "sliced-wasserstein"}
SWAPPED = "-prior-of-"  # in the variant of what was sampled with another group's prior, to see what that does


def is_metric(key: str) -> bool:
    """Metric keys have slashes; ``round``, ``seconds`` and the like have none."""
    return "/" in key and not key.startswith(TRAINING)


def split_key(key: str) -> tuple[str, str]:
    """The metric, and the group or silo that it is of (empty: everybody).

    >>> split_key("blend/domain-cnn/n1000/group=mnist")
    ('blend/domain-cnn/n1000', 'mnist')
    """
    metric, *whose = re.split(r"/(?:group|silo)=", key, maxsplit=1)
    return metric, "".join(whose)


def best(key: str, values: Iterable[float | None]) -> float | None:
    """The better of some values; None where the metric has no better side, or all are the same."""
    metric = key.partition("/")[0]
    known = {value for value in values if value is not None and math.isfinite(value)}
    if len(known) < 2 or metric not in HIGHER | LOWER or SWAPPED in split_key(key)[0]:
        return None
    return max(known) if metric in HIGHER else min(known)
