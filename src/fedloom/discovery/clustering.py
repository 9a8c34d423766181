"""Which silos belong together, and how many groups there are, from one noisy vector of each.

Directions in which silos differ no more than noise and sampling explain are left out. In what is left, Ward's
hierarchical clustering gives a partition for every number of groups, and the gap statistic (Tibshirani, Walther,
Hastie, "Estimating the number of clusters in a data set via the gap statistic", 2001) chooses among them: what remains
within groups is compared with what would remain if silos were spread evenly, with the same variance and the same
noise. Where so even a spread would look as clustered more than once in a hundred times, there is one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import MissingExtraError
from fedloom.outline import in_outline

Matrix = NDArray[np.float64]

DRAWS = 399  # of silos without groups
LEVEL = 0.01  # how often such silos may be divided
SLACK = 3.0  # standard deviations by which fewer groups may be worse than the best number
FEWEST = 6  # silos: fewer look too often as if they had groups
TINY = 1e-300


@dataclass(frozen=True)
class Found:
    """The groups of silos, and how sure that is."""

    __repr__ = in_outline

    labels: tuple[int, ...]  # of each silo; groups are numbered in the order of their first silo
    odds: Matrix  # (silos, groups): how likely each silo is of each group, by the noise of what it sent
    directions: int  # in which silos differ more than noise explains
    chance: float  # how often silos without groups look as clustered
    places: Matrix  # (silos, 2): where each lies in the two directions in which they differ most
    error: tuple[float, ...]  # of each silo's place: the standard deviation of noise and sampling


def hierarchy() -> Any:
    """scipy's hierarchical clustering, or the name of the extra that brings it."""
    try:
        from scipy.cluster import hierarchy
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"groups are found by '{error.name}'; pip install 'fedloom[eval]'") from error
    return hierarchy


def find_groups(points: Matrix, variances: Matrix, *, most: int, groups: int = 0, seed: int = 0) -> Found:
    """Of silos at these points (silos, numbers), with noise of these variances in each of their numbers.

    ``groups`` is how many there are; 0: at most ``most``, by the criterion.
    """
    generator = np.random.default_rng(seed)
    left, sizes, _ = np.linalg.svd(points - points.mean(axis=0), full_matrices=False)
    rotated = left * sizes
    directions = int((sizes > _edge(points.shape, variances, generator)).sum())
    kept, chance, count = rotated[:, :directions], 1.0, 1
    if directions:
        chance, count = _chosen(kept, variances, min(most, len(points) // 2), generator)
    if groups:
        kept, count = kept if directions else rotated, groups
    labels = _cut(kept, count)
    return Found(labels, _odds(kept, variances, labels), directions, chance, rotated[:, :2], tuple(np.sqrt(variances)))


def _edge(shape: tuple[int, ...], variances: Matrix, generator: np.random.Generator) -> float:
    """The length of the longest direction that noise alone reaches, but once in a hundred times."""
    longest = []
    for _ in range(DRAWS):
        noise = generator.normal(size=shape) * np.sqrt(variances)[:, None]
        longest.append(np.linalg.norm(noise - noise.mean(axis=0), 2))
    return float(np.quantile(longest, 1 - LEVEL))


def _remaining(points: Matrix, most: int) -> Matrix:
    """The logarithm of the sum of squares within groups, for 1 to ``most`` of them."""
    added = hierarchy().ward(points)[:, 2] ** 2 / 2  # by each merge, the last of which makes one group
    within: Matrix = np.cumsum(added)[::-1]
    return np.log(np.maximum(within[:most], TINY))


def _chosen(points: Matrix, variances: Matrix, most: int, generator: np.random.Generator) -> tuple[float, int]:
    """How often silos without groups look as clustered, and the number of groups."""
    spread = np.sqrt(3 * np.maximum(points.var(axis=0) - variances.mean(), 0.0))
    null = np.empty((DRAWS, most))
    for draw in null:
        even = generator.uniform(-1, 1, size=points.shape) * spread
        draw[:] = _remaining(even + generator.normal(size=points.shape) * np.sqrt(variances)[:, None], most)
    usual, deviation = null.mean(axis=0), np.maximum(null.std(axis=0), TINY)
    gaps = usual - _remaining(points, most)
    clustered = ((usual - null) / deviation)[:, 1:].max(axis=1)
    chance = (1 + int((clustered >= (gaps / deviation)[1:].max()).sum())) / (1 + DRAWS)
    if chance > LEVEL:
        return chance, 1
    best = 1 + int(np.argmax(gaps[1:]))
    return chance, 1 + next(i for i in range(1, most) if gaps[i] >= gaps[best] - SLACK * deviation[best])


def _cut(points: Matrix, groups: int) -> tuple[int, ...]:
    if groups == 1:
        return (0,) * len(points)
    found = hierarchy().fcluster(hierarchy().ward(points), groups, "maxclust").tolist()
    order = {label: number for number, label in enumerate(dict.fromkeys(found))}
    return tuple(order[label] for label in found)


def _odds(points: Matrix, variances: Matrix, labels: tuple[int, ...]) -> Matrix:
    """Of a normal spread around the centre of each group: that of all members, or a silo's noise where it is more."""
    member = np.array(labels)
    centres = np.stack([points[member == group].mean(axis=0) for group in range(member.max() + 1)])
    free = max((len(points) - len(centres)) * points.shape[1], 1)
    spread = float(((points - centres[member]) ** 2).sum()) / free
    width = np.maximum(np.maximum(spread, variances), TINY)[:, None]
    distance = ((points[:, None] - centres) ** 2).sum(axis=2)
    likely: Matrix = np.exp(-(distance - distance.min(axis=1, keepdims=True)) / (2 * width))
    shares: Matrix = likely / likely.sum(axis=1, keepdims=True)
    return shares
