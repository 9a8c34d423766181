"""A silo's plan by itself: what it will be charged for, against what it was granted."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from fedloom.config import PrivacyConfig
from fedloom.federation.records import Batch
from fedloom.privacy.accounting import Budget, Gaussian, NoGuarantee, allocation
from fedloom.privacy.payload_sums import BoundedSum
from fedloom.privacy.silo_privacy import REPEATABLE, PlannedPayload, SiloPrivacy
from fedloom.sharing.plan import Tensors

SETTINGS = PrivacyConfig(mechanism="dp-sgd", epsilon=3.0, delta=1e-3, accountant="rdp")
OWN_ROUNDS = (2, 4, 5)


def nothing(_: torch.nn.Module, batch: Batch) -> Tensors:
    return {"sum": torch.zeros(len(batch.x), 1)}


MOMENTS = PlannedPayload("moments", BoundedSum(nothing), OWN_ROUNDS, 0.2)
PLAN = SiloPrivacy("north", 100, OWN_ROUNDS, 7, 10, SETTINGS)


@pytest.mark.parametrize("kind", ["uniform", "late"])
@pytest.mark.parametrize("payloads", [(), (MOMENTS,)], ids=["", "moments"])
@pytest.mark.parametrize("pretraining", [0, 4])
def test_all_that_is_planned_together_spends_the_budget_and_no_more(
    kind: Literal["uniform", "late"], payloads: tuple[PlannedPayload, ...], pretraining: int
) -> None:
    settings = replace(SETTINGS, allocation=kind)
    plan = replace(PLAN, settings=settings, payloads=payloads, pretraining=pretraining)
    charged = [event for round in OWN_ROUNDS for event in plan.events(round).values()]
    assert len(charged) == len(OWN_ROUNDS) * (1 + len(payloads)) + (pretraining > 0)
    assert (
        sum(event.steps for event in charged if isinstance(event, Gaussian) and event.rate < 1) == 3 * 7 + pretraining
    )
    assert 0.99 * 3 <= plan.budget.spent(charged) <= 3


def test_pretraining_is_charged_in_the_silos_own_first_round() -> None:
    plan = replace(PLAN, pretraining=4)
    assert [round for round in range(1, 6) if "pretraining" in plan.events(round)] == [2]
    assert [round for round in range(1, 6) if plan.pretrains(round)] == [2]
    assert plan.events(2)["pretraining"] == Gaussian(plan.pretraining_mechanism.noise_multiplier, 0.1, 4)


def test_noise_that_is_given_is_divided_by_the_root_of_a_rounds_weight() -> None:
    settings = replace(SETTINGS, epsilon=0.0, noise_multiplier=2.0, allocation="late")
    plan = replace(PLAN, rounds=tuple(range(1, 17)), settings=settings, payloads=(MOMENTS,))
    costs = [4 / plan.noise[round] ** 2 for round in plan.rounds]
    assert costs == pytest.approx(allocation(16, "late"))
    assert plan.payload_noise == {"moments": 2.0}
    assert plan.budget.epsilon == float("inf")


def test_silos_that_share_their_noise_plan_for_the_strictest_in_training_and_in_payloads() -> None:
    strict = replace(PLAN, silo="south", settings=replace(SETTINGS, epsilon=1.0))
    for lenient, harsh in (
        (PLAN, strict),
        (replace(PLAN, steps=0, payloads=(MOMENTS,)), replace(strict, steps=0, payloads=(MOMENTS,))),
    ):
        alone = harsh.noise | harsh.payload_noise
        both = (lenient, harsh)
        assert all(min(alone.values()) > noise for noise in (lenient.noise | lenient.payload_noise).values())
        for plan in (replace(each, partners=both) for each in both):
            assert plan.noise | plan.payload_noise == alone


def test_the_budget_is_the_silos_own_for_its_own_unit() -> None:
    settings = replace(SETTINGS, unit="subject", budgets={"north": 2.0, "south": 1.0})
    assert replace(PLAN, settings=settings).budget == Budget(2.0, 1e-3, "rdp", "subject")
    assert replace(PLAN, silo="east", settings=replace(settings, delta=0.0)).budget == Budget(
        3.0, 1e-3, "rdp", "subject"
    )
    assert replace(PLAN, settings=replace(settings, clipping="median")).budget.epsilon == float("inf")


def test_noise_that_a_seed_gives_is_as_large_as_any_and_charged_as_no_guarantee() -> None:
    honest = replace(PLAN, payloads=(MOMENTS,), pretraining=4)
    plan = replace(honest, settings=replace(SETTINGS, noise="test"))
    nothing_holds = NoGuarantee(REPEATABLE)
    assert plan.events(2) == dict.fromkeys(("update", "pretraining", "moments"), nothing_holds)
    assert plan.events(4) == dict.fromkeys(("update", "moments"), nothing_holds)
    assert (plan.problem, plan.budget.epsilon) == (REPEATABLE, float("inf"))
    assert (honest.problem, honest.budget.epsilon) == ("", 3.0)
    assert not any(isinstance(event, NoGuarantee) for event in honest.events(2).values())
    assert (plan.granted, plan.noise, plan.payload_noise) == (honest.granted, honest.noise, honest.payload_noise)
    assert plan.least_noise == honest.least_noise
