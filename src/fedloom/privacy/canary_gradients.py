"""The mechanism itself under attack: canaries that are gradients, put through clipping, sampling, noise and release.

Nasr, Hayes, Steinke, Balle, Tramer, Jagielski, Carlini, Terzis, "Tight Auditing of Differentially Private Machine
Learning" (USENIX Security 2023): an attacker who chooses the gradient of an example and sees every release has all the
power that the definition grants him, and no training is needed. With many of them at once, at right angles, one run is
enough (Steinke, Nasr, Jagielski, NeurIPS 2023).

What it sees is whatever makes releases tell far more than they are charged for, anywhere between a gradient and its
release: a tenth of the noise, a bound that does not bind, coins that fall too often. Half the noise it sees by luck
alone, because what one run shows stays well below the true epsilon: of 1.99 about 0.5, and where half the noise makes
it 4.4, about 1.6. The width of what silos send is measured exactly in tests/engines/test_conformance.py, which is the
test for that. Nothing of engines, ledgers and models is looked at here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.privacy.audits import CONFIDENCE, CanaryAudit, audit_canaries
from fedloom.privacy.dp_sgd import DPSGD, ClippedSum, total_of
from fedloom.privacy.gradient_forms import Whole
from fedloom.privacy.noise import NoiseKey, Randomness
from fedloom.privacy.sampling import capacity, passes, poisson_sample

LONG = 10.0  # gradients before clipping, in bounds: how they are clipped is tested, too


def audit_mechanism(
    mechanism: DPSGD,
    steps: int,
    randomness: Randomness,
    *,
    delta: float,
    canaries: int = 1000,
    confidence: float = CONFIDENCE,
) -> CanaryAudit:
    """Guess which canaries took part in so many steps of a mechanism, whose claim is what ``event(steps)`` costs.

    Each canary takes part by a coin of its own, and is then drawn at the mechanism's rate in every step. Its gradient
    is ``LONG`` bounds long, at right angles to all others. The auditor knows all of this but the coins, and sees every
    release; a canary's score is how much likelier they are if it takes part. Where silos share the noise, this is the
    release of a single one, of which nothing is claimed.
    """
    if mechanism.problem:
        raise ConfigError(f"there is no claim that canaries could refute: {mechanism.problem}")
    directions = right_angles(canaries)
    parts = [canaries - canaries // 4, canaries // 4]  # two parameters, which must be clipped together
    parameters = {name: torch.zeros(size) for name, size in zip(("weight", "bias"), parts, strict=True)}
    included = randomness.uniform(canaries, NoiseKey(0, 0, 0, "canaries")) < 0.5
    rows = capacity(torch.ones(canaries, dtype=torch.int64), mechanism.rate)
    bound, scores = mechanism.clipping.start(), torch.zeros(canaries, dtype=torch.float64)
    for step in range(steps):
        noise_key, sums = NoiseKey(0, 1, step), list[ClippedSum]()
        drawn = poisson_sample(randomness, canaries, mechanism.rate, noise_key)
        for each in passes(drawn[included[drawn]], rows):
            gradients = torch.split(LONG * bound * directions[each.index], parts, dim=1)
            forms = {name: Whole(part) for name, part in zip(parameters, gradients, strict=True)}
            sums.append(mechanism.clip(forms, each.mask, bound, each.index))
        released, following = mechanism.release(total_of(sums), mechanism.draw(parameters, randomness, noise_key))
        seen = directions @ torch.cat([released[name] for name in parameters])
        scores += evidence(seen.double() * mechanism.expected / bound, mechanism.noise_multiplier, mechanism.rate)
        bound = following
    return audit_canaries(scores, included, delta=delta, confidence=confidence)


def right_angles(count: int) -> Tensor:
    """So many vectors of length 1 (rows) at right angles to each other, each spread over all coordinates: cosines."""
    order = torch.arange(count, dtype=torch.float64)
    rows = torch.cos(math.pi / count * order.unsqueeze(1) * (order + 0.5)) * math.sqrt(2 / count)
    rows[0] /= math.sqrt(2)
    return rows.float()


def evidence(seen: Tensor, noise: float, rate: float) -> Tensor:
    """Log likelihood ratio of a number with normal noise that was 1 by a coin of this rate, and 0 otherwise."""
    drawn = math.log(rate) + (seen - 0.5) / noise**2
    return drawn if rate == 1 else torch.logaddexp(drawn, torch.full_like(drawn, math.log1p(-rate)))
