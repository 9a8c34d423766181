"""Attacks that test a claim from below: canaries, membership inference, exposed outliers. Arrays in, numbers out.

An attack that succeeds too often refutes a claim; one that fails proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.privacy.statistics import distributions, proportion_interval

CONFIDENCE = 0.95
LARGEST = 50.0  # no audit can tell larger epsilons apart


# Canaries: one run is enough


def chance_of_guessing(epsilon: float, delta: float, canaries: int, guesses: int, correct: int) -> float:
    """At most how likely an (epsilon, delta)-DP training lets somebody guess so many coins right.

    Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS 2023), theorem 5.2: each guess is
    right with probability e^eps / (1 + e^eps) at most, but for a term in delta.
    """
    if not correct:
        return 1.0
    binomial = distributions().binom(guesses, 1 / (1 + math.exp(-epsilon)))
    masses = binomial.pmf(np.arange(correct - 1, -1, -1)).cumsum()
    slack = float((masses / np.arange(1, correct + 1)).max())
    return min(1.0, float(binomial.sf(correct - 1)) + 2 * canaries * delta * slack)


def epsilon_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The largest epsilon that so many right guesses rule out at this confidence; 0 if they rule out none."""
    if not 0 <= correct <= guesses <= canaries:
        raise ConfigError(f"{correct} right of {guesses} guesses about {canaries} canaries is no possible outcome")
    doubt = 1 - confidence
    low, high = 0.0, LARGEST
    if chance_of_guessing(low, delta, canaries, guesses, correct) >= doubt:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        possible = chance_of_guessing(middle, delta, canaries, guesses, correct) >= doubt
        low, high = (low, middle) if possible else (middle, high)
    return low


@dataclass(frozen=True)
class CanaryAudit:
    """What one run with canaries shows."""

    canaries: int
    guesses: int
    correct: int
    delta: float
    confidence: float
    lower_bound: float

    def refutes(self, claimed: float | None) -> bool:
        """Whether the claimed epsilon cannot be true, at the audit's confidence."""
        return claimed is not None and self.lower_bound > claimed

    def sentence(self, claimed: float | None) -> str:
        """What a report may say; None: the run claims nothing."""
        found = f"{self.correct} of {self.guesses} guesses right; epsilon is at least {self.lower_bound:.3g}"
        sure = f"at {self.confidence:.0%} confidence (delta {self.delta:g})"
        if claimed is None:
            return f"{found} {sure}; the run claims no epsilon"
        if self.refutes(claimed):
            return f"the claim of epsilon {claimed:.3g} is refuted: {found} {sure}"
        return f"{found} {sure}, claimed {claimed:.3g}: not refuted, which is no evidence of privacy"


def audit_canaries(
    scores: Tensor,
    included: Tensor,
    *,
    delta: float,
    confidence: float = CONFIDENCE,
    guesses: Sequence[int] = (),
) -> CanaryAudit:
    """Guess "in" for the highest scores and "out" for the lowest, and bound epsilon by how often that is right.

    ``guesses`` are numbers of guesses to try; the best counts, at a confidence that pays for the choice. By default a
    tenth, a quarter and all of the canaries.
    """
    canaries = len(scores)
    if canaries < 2 or len(included) != canaries:
        raise ConfigError(f"an audit needs a score and a coin for each of at least 2 canaries, not {canaries} scores")
    tried = [count for count in guesses or (canaries // 10, canaries // 4, canaries) if count >= 2]
    coins = included.to(torch.bool)[torch.argsort(scores, descending=True, stable=True)]
    each = 1 - (1 - confidence) / len(tried)
    found = []
    for count in tried:
        top, bottom = (count + 1) // 2, count // 2
        correct = int(coins[:top].sum()) + int((~coins[canaries - bottom :]).sum())
        bound = epsilon_lower_bound(canaries, count, correct, delta, each)
        found.append(CanaryAudit(canaries, count, correct, delta, confidence, bound))
    return max(found, key=lambda audit: audit.lower_bound)


# Membership inference


def nearest_distances(points: Tensor, samples: Tensor, chunk: int = 1024) -> Tensor:
    """How far each point is from the nearest sample."""
    flat, others = points.flatten(1), samples.flatten(1)
    return torch.cat([torch.cdist(part, others).amin(dim=1) for part in torch.split(flat, chunk)])


def density_scores(points: Tensor, synthetic: Tensor, reference: Tensor) -> Tensor:
    """Log density of the synthetic data over that of other data of the same kind.

    After DOMIAS (van Breugel, Sun, Qian, van der Schaar, "Membership Inference Attacks against Synthetic Data through
    Overfitting Detection", AISTATS 2023), with nearest-neighbour estimates of both densities, per dimension.
    """
    small = torch.finfo(points.dtype).tiny
    apart, close = (nearest_distances(points, data).clamp_min(small) for data in (reference, synthetic))
    return torch.log(apart) - torch.log(close)


@dataclass(frozen=True)
class Rate:
    """A share of cases, with its exact confidence interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, hits: int, trials: int, confidence: float = CONFIDENCE) -> Rate:
        """The share of hits among trials."""
        return cls(hits / trials, *proportion_interval(hits, trials, confidence))


def true_positive_rate(members: Tensor, others: Tensor, false_positive_rate: float) -> Rate:
    """The share of members found when at most so many others are taken for members (Carlini et al. 2022)."""
    if not 0 <= false_positive_rate < 1:
        raise ConfigError(f"the false positive rate is {false_positive_rate}; it must be at least 0 and below 1")
    allowed = math.floor(false_positive_rate * len(others) + 1e-9)
    threshold = torch.sort(others, descending=True).values[allowed]
    return Rate.of(int((members > threshold).sum()), len(members))


def attack_area(members: Tensor, others: Tensor) -> float:
    """The chance that a member scores higher than another record, ties counted half: 0.5 is guessing."""
    ordered = torch.sort(others).values
    below = torch.searchsorted(ordered, members, right=False) + torch.searchsorted(ordered, members, right=True)
    return float(below.double().mean() / 2 / len(others))


# Outliers

USUAL = 0.95  # the quantile of typical records' distances within which an output is called close


def recognisable(
    points: Tensor, outputs: Tensor, others: Tensor, limit: float, own: Tensor | None = None, chunk: int = 512
) -> Tensor:
    """Whether each point would be told from what came out: its output is within ``limit``, and shows nobody else.

    ``outputs`` hold for each point what came out closest to it. It shows the point if it lies nearer to it than to any
    of the ``others``; where points are some of these, ``own`` numbers them there, because nothing is compared with
    itself. ``limit`` is how close outputs usually come: :func:`usual_distance`.
    """
    flat, known = outputs.flatten(1), others.flatten(1)
    nearest = []
    for rows in torch.split(torch.arange(len(flat), device=flat.device), chunk):
        distances = torch.cdist(flat[rows], known)
        if own is not None:
            distances[torch.arange(len(rows), device=flat.device), own[rows]] = torch.inf
        nearest.append(distances.amin(dim=1))
    distance = distances_between(points, outputs)
    return (distance <= limit) & (distance < torch.cat(nearest))


def distances_between(points: Tensor, outputs: Tensor) -> Tensor:
    """How far each point is from the output in the same row."""
    lengths: Tensor = (points - outputs).flatten(1).norm(dim=1)
    return lengths


def usual_distance(typical: Tensor, outputs: Tensor) -> float:
    """All but 5 % of typical training records have an output as close as this."""
    return float(distances_between(typical, outputs).quantile(USUAL))


@dataclass(frozen=True)
class Exposure:
    """How often records are recognisable in what came out, by one rule for all of them."""

    outliers: Rate | None  # those that were put in, if some were
    unseen_outliers: Rate  # like them, but never trained on
    typical: Rate  # other training records
    unseen_typical: Rate  # held-out records

    @property
    def memorised(self) -> bool:
        """Whether outliers that were put in are recognisable beyond doubt more often than those that were not."""
        return self.outliers is not None and self.outliers.low > self.unseen_outliers.high
