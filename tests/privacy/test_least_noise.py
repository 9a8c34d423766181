"""The least noise of a plan, which a silo's policy bounds: of every round, of pretraining and of every payload."""

from __future__ import annotations

import math

import pytest

from fedloom.config import PrivacyConfig
from fedloom.privacy.payload_sums import BoundedSum
from fedloom.privacy.silo_privacy import PlannedPayload, SiloPrivacy

SUM = BoundedSum(lambda *_: {})


def plan(
    rounds: int = 2, steps: int = 3, pretraining: int = 0, payload: float = 0.0, **settings: object
) -> SiloPrivacy:
    """100 records in batches of 10."""
    payloads = (PlannedPayload("moments", SUM, (1,), payload),) if payload else ()
    privacy = PrivacyConfig(mechanism="dp-sgd", **settings)  # type: ignore[arg-type]
    return SiloPrivacy("a", 100, tuple(range(1, rounds + 1)), steps, 10, privacy, payloads, pretraining=pretraining)


def test_of_all_rounds() -> None:
    assert plan(noise_multiplier=0.6).least_noise == 0.6
    late = plan(rounds=8, noise_multiplier=0.6, allocation="late")
    assert late.least_noise == pytest.approx(0.6 / math.sqrt(3))
    assert late.least_noise == late.noise[8] < late.noise[1]


@pytest.mark.parametrize(("part", "least"), [(0.01, "update"), (0.9, "pretraining")])
def test_of_pretraining(part: float, least: str) -> None:
    found = plan(pretraining=3, epsilon=3.0, accountant="rdp", shares={"pretraining": part})
    noises = {"update": found.noise[1], "pretraining": found.pretraining_mechanism.noise_multiplier}
    assert found.least_noise == noises[least] == min(noises.values())
    assert noises["update"] != noises["pretraining"]


@pytest.mark.parametrize("steps", [0, 400])
def test_of_payloads(steps: int) -> None:
    """A single sum of half the budget has less noise than 800 steps of the other half."""
    found = plan(steps=steps, epsilon=3.0, accountant="rdp", payload=0.5)
    assert found.least_noise == found.payload_noise["moments"]
    assert len(found.noise) == (2 if steps else 0)
    assert all(found.least_noise < noise for noise in found.noise.values())


def test_of_nothing() -> None:
    assert plan(rounds=0, epsilon=3.0).least_noise == math.inf
