"""Canary gradients through the true mechanism: what they refute, what they must not, and what they cannot see."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.privacy import dp_sgd
from fedloom.privacy.accounting import Budget, Gaussian, noise_multiplier, spent
from fedloom.privacy.canary_gradients import audit_mechanism, evidence, right_angles
from fedloom.privacy.clipping import Clipping, Fixed, MedianNorm, Quantile
from fedloom.privacy.dp_sgd import DPSGD
from fedloom.privacy.noise import NoiseKey, SecureNoise

DELTA, EPSILON, CANARIES = 1e-5, 2.0, 1000
SETTINGS = {"one whole batch": (1.0, 1), "whole batches": (1.0, 20), "sampled": (0.1, 60), "seldom": (0.05, 120)}


def calibrated(setting: str, clipping: Clipping | None = None, unit: Any = "record") -> tuple[DPSGD, int]:
    """A mechanism that claims epsilon 2 for its steps."""
    rate, steps = SETTINGS[setting]
    noise = noise_multiplier(Budget(EPSILON, DELTA), rate=rate, steps=steps)
    return DPSGD(noise, rate, rate * CANARIES, clipping or Fixed(0.7), unit), steps


def claimed(mechanism: DPSGD, steps: int) -> float:
    found = spent([mechanism.event(steps)], DELTA)
    assert 0.98 * EPSILON < found <= EPSILON
    return found


def with_less_noise(patch: pytest.MonkeyPatch, factor: float) -> None:
    honest = DPSGD.gradient_noise.fget
    patch.setattr(DPSGD, "gradient_noise", property(lambda mechanism: factor * honest(mechanism)))


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_honest_mechanism_is_never_refuted(setting: str) -> None:
    """That would take 95 of the 100 boldest guesses, of which 74 are right on average: less than once in 10^7 times."""
    mechanism, steps = calibrated(setting)
    claim = claimed(mechanism, steps)
    audits = [audit_mechanism(mechanism, steps, SecureNoise(), delta=DELTA) for _ in range(20)]
    assert not any(audit.refutes(claim) for audit in audits)
    assert sum(audit.lower_bound for audit in audits) / 20 > 0.1, "no idle bound"
    assert {audit.canaries for audit in audits} == {CANARIES}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_tenth_of_the_noise_is_refuted(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism, steps = calibrated(setting)
    with_less_noise(monkeypatch, 0.1)
    audit = audit_mechanism(mechanism, steps, SecureNoise(), delta=DELTA)
    assert audit.refutes(claimed(mechanism, steps))
    assert audit.sentence(EPSILON).startswith("the claim of epsilon 2 is refuted")


@pytest.mark.parametrize("factor", [1.0, 0.1])
@pytest.mark.parametrize(
    ("clipping", "unit"), [(Quantile(initial=0.3), "record"), (Fixed(3.0), "subject")], ids=["quantile", "subjects"]
)
def test_of_every_kind_of_mechanism(
    clipping: Clipping, unit: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism, steps = calibrated("sampled", clipping, unit)
    with_less_noise(monkeypatch, factor)
    audit = audit_mechanism(mechanism, steps, SecureNoise(), delta=DELTA)
    assert audit.refutes(claimed(mechanism, steps)) == (factor < 1)


def test_what_half_the_noise_shows_is_true_but_less_than_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why the width of noise is measured as well."""
    mechanism, steps = calibrated("one whole batch")
    with_less_noise(monkeypatch, 0.5)
    truth = spent([Gaussian(0.5 * mechanism.noise_multiplier)], DELTA)
    assert truth == pytest.approx(4.4, abs=0.1)
    assert audit_mechanism(mechanism, steps, SecureNoise(), delta=DELTA).lower_bound < truth


def all_of_it(norms: Tensor, bound: Tensor, mask: Tensor) -> Tensor:
    """Nothing is clipped."""
    return mask


def test_a_bound_that_does_not_bind_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism, steps = calibrated("sampled")
    monkeypatch.setattr(dp_sgd, "clip_factors", all_of_it)
    assert audit_mechanism(mechanism, steps, SecureNoise(), delta=DELTA).refutes(claimed(mechanism, steps))


def often(count: int, noise_key: NoiseKey) -> Tensor:
    """Coins that draw a record ten times as often; whether a canary takes part is left alone."""
    return SecureNoise().uniform(count, noise_key) / (1 if noise_key.use else 10)


def test_coins_that_fall_too_often_are_refuted() -> None:
    mechanism, steps = calibrated("seldom")
    randomness: Any = SimpleNamespace(uniform=often, normal=SecureNoise().normal)
    assert audit_mechanism(mechanism, steps, randomness, delta=DELTA).refutes(claimed(mechanism, steps))


def test_directions_are_at_right_angles_and_use_all_coordinates() -> None:
    found = right_angles(64)
    torch.testing.assert_close(found @ found.T, torch.eye(64), rtol=0, atol=1e-5)
    assert (found.abs() < 0.2).all(), "the square root of 2/64 is 0.177"


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_evidence_is_the_logarithm_of_a_likelihood_ratio(rate: float) -> None:
    seen, noise = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64), 0.8
    zero, one = (torch.exp(-(seen - mean).square() / (2 * noise**2)) for mean in (0.0, 1.0))
    ratio = (rate * one + (1 - rate) * zero) / zero
    torch.testing.assert_close(evidence(seen, noise, rate), ratio.log())


@pytest.mark.parametrize(
    ("mechanism", "reason"),
    [
        (lambda: DPSGD(1.0, 0.1, 100.0, MedianNorm()), "the clip bound is the median"),
        (lambda: DPSGD(0.0, 0.1, 100.0), "no noise is added"),
        (lambda: DPSGD(1.0, 0.1, 100.0, blocks=("decoder",)), "only decoder is privatised"),
    ],
)
def test_what_claims_nothing_cannot_be_refuted(mechanism: Callable[[], DPSGD], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no claim that canaries could refute: {reason}"):
        audit_mechanism(mechanism(), 1, SecureNoise(), delta=DELTA)
