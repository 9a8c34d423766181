"""What is said of a run, from ledgers whose silos differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from fedloom.config import PrivacyConfig
from fedloom.privacy.accounting import Budget, Event, Gaussian, NoGuarantee
from fedloom.privacy.ledger import Ledger, format_epsilon
from fedloom.privacy.summary import PrivacySummary, summarise

SETTINGS = PrivacyConfig(mechanism="dp-sgd", epsilon=9.0, clip=0.5)
FEW, MUCH = Gaussian(8.0), Gaussian(2.0)
LOOSE, TIGHT = Budget(math.inf, 1e-3, "rdp"), Budget(math.inf, 1e-5, "rdp")


def summary_of(path: Path, charged: Mapping[Budget, Mapping[str, Event]]) -> PrivacySummary:
    """Of one silo for each budget, which paid for these releases."""
    ledger = Ledger(path / "ledger.sqlite")
    for number, (budget, releases) in enumerate(charged.items()):
        ledger.enrol(f"silo-{number}", "digest", budget)
        ledger.charge_all("run", f"silo-{number}", 1, releases, content=None)
    ledger.close()
    return summarise(SETTINGS, path / "ledger.sqlite")


@pytest.mark.parametrize("spender", [LOOSE, TIGHT])
def test_the_silo_that_spent_most_and_the_largest_delta_speak_for_all(spender: Budget, tmp_path: Path) -> None:
    charged = {budget: {"update": MUCH if budget is spender else FEW} for budget in (LOOSE, TIGHT)}
    found = summary_of(tmp_path, charged)
    spent, replaced = spender.spent([MUCH]), spender.spent([MUCH], "replaced")
    assert found.guarantee == (
        f"({format_epsilon(spent)}, 0.001)-differential privacy for each record, by what every silo has spent so far"
    )
    assert (
        found.parts["replacement"] == f"for one record replaced by another: at most epsilon {format_epsilon(replaced)}"
    )
    values = found.to_mapping()
    assert (values["epsilon"], values["epsilon_replaced"], values["delta"]) == (spent, replaced, 1e-3)
    assert values["replacement"] == found.parts["replacement"]


def test_one_release_of_one_silo_without_a_guarantee_voids_it_for_all(tmp_path: Path) -> None:
    unsafe = {"update": FEW, "median": NoGuarantee("medians are not noised")}
    found = summary_of(tmp_path, {TIGHT: {"update": FEW}, LOOSE: unsafe})
    assert found.guarantee == "no DP guarantee: medians are not noised"
    assert found.epsilon is found.replaced is None
    assert "replacement" not in found.parts


def test_nothing_spent_is_no_claim(tmp_path: Path) -> None:
    found = summary_of(tmp_path, {TIGHT: {}, LOOSE: {}})
    assert found.guarantee == "differential privacy is planned, and nothing has been spent yet"
    assert found.epsilon == found.replaced == 0
    assert "replacement" not in found.parts


def test_the_mechanism_names_payloads_and_not_the_steps_of_training(tmp_path: Path) -> None:
    found = summary_of(tmp_path, {TIGHT: {"pretraining": FEW, "update": FEW, "moments": FEW, "counts": FEW}})
    wanted = "dp-sgd, fixed clip bound 0.5; noisy sums of bounded contributions (counts, moments)"
    assert found.parts["mechanism"] == wanted
