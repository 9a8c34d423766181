"""A silo's own ledger in a deployment: one for its data, charged for what is new, whatever dies and comes back."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.errors import FedloomError
from fedloom.privacy.accounting import Budget, Gaussian
from fedloom.privacy.deployment import data_ledger
from fedloom.privacy.ledger import BudgetSpentError, GrantError, Ledger
from fedloom.privacy.registry import LedgerRegistry
from privacy.sqlite_faults import EVENT, RELEASES, SILO, deploy


def charges(path: Path) -> Counter[tuple[int, str]]:
    """(round, release) -> how often it was paid for."""
    ledger = Ledger(path)
    found = Counter((round, release) for round, release in ledger._rows("SELECT round, release FROM charges"))
    ledger.close()
    return found


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_a_kill_at_any_write_of_a_run_never_leaves_a_release_unpaid(tmp_path: Path) -> None:
    """Two rounds, killed at the first write of ledger or shelf, then at the second, and so on; noise never repeats."""
    ledger, sent = tmp_path / "ledger.sqlite", tmp_path / "sent"
    before: Counter[tuple[int, str]] = Counter()
    kills = 0
    while not deploy(tmp_path, sent, 2, kills + 1):
        kills += 1
        if not ledger.exists():
            continue
        paid = charges(ledger)
        assert all(paid[key] >= count for key, count in before.items()), "the spent amount went down"
        out = Counter(int(line.partition("/")[0]) for line in set(lines(sent)))
        for round, different in out.items():
            assert all(paid[round, release] >= different for release in RELEASES), "sent, but not paid for"
        assert len({paid[key] for key in paid if key[0] == 1}) <= 1, "a round is paid for whole or not at all"
        before = paid
    assert kills > 30
    assert before[1, "update"] > 1, "some attempt was lost and paid for again"
    paid = charges(ledger)
    again = tmp_path.rename(tmp_path.with_name("moved"))  # ledger, registry and all
    assert deploy(again, again / "sent", 2, 0)
    assert charges(again / "ledger.sqlite") == paid, "what was stored is sent again for nothing"
    assert len(set(lines(again / "sent")[-4:])) == 2
    (entry,) = LedgerRegistry(again / "registry").entries()
    assert (entry.path, entry.charges) == (again / "ledger.sqlite", sum(paid.values()))


def test_what_is_not_the_finished_bytes_is_another_release(tmp_path: Path) -> None:
    ledger = data_ledger(tmp_path / "ledger.sqlite", SILO, 50.0)
    shelf: list[bytes] = []
    made = iter((b"first", b"second"))

    def released(stored: bytes | None) -> bytes:
        return ledger.released(
            "run", "north", 1, RELEASES, content=None, stored=stored, make=lambda: next(made), store=shelf.append
        )

    assert released(None) == b"first" == released(b"first")
    assert released(b"forged") == b"second"
    assert shelf == [b"first", b"second"]
    assert len(ledger.events("north", "update")) == len(ledger.events("north", "moments")) == 2


def test_a_round_is_paid_for_whole_or_not_at_all(tmp_path: Path) -> None:
    """The second release would pass the budget, so the first is not charged either."""
    ledger = data_ledger(tmp_path / "ledger.sqlite", SILO, 2.0, 1e-5)
    with pytest.raises(BudgetSpentError, match="release 'moments' would raise its epsilon"):
        ledger.charge_all("run", "north", 1, {"update": EVENT, "moments": Gaussian(1.0)}, content=None)
    assert ledger.events("north") == []
    ledger.charge_all("run", "north", 1, {"update": EVENT}, content=None)
    assert ledger.events("north") == [EVENT]


def test_the_budget_holds_over_all_runs_by_a_filter_and_is_bound_to_the_data(tmp_path: Path) -> None:
    """Runs are chosen after looking at earlier ones, so the filter's order is fixed beforehand: it stops early."""
    path = tmp_path / "ledger.sqlite"
    ledger = data_ledger(path, SILO, 3.0, 1e-5)
    budget = Budget(3.0, 1e-5, "filter")
    paid = 0
    while budget.allows([EVENT] * (paid + 1)):
        ledger.charge_all(f"run-{paid}", "north", 1, {"update": EVENT}, content=None)
        paid += 1
    assert paid > 5
    with pytest.raises(BudgetSpentError, match="silo 'north' sits out round 1"):
        ledger.charge_all("one too many", "north", 1, {"update": EVENT}, content=None)
    events = [EVENT] * paid
    assert budget.spent(events) >= Budget(3.0, 1e-5, "rdp").spent(events)
    ledger.close()
    assert data_ledger(path, SILO, 3.0, 1e-5).accounts()[0].budget == budget
    changed = replace(SILO, train=replace(SILO.train, x=torch.ones(20, 2)))
    with pytest.raises(FedloomError, match="other data than those of silo 'north'"):
        data_ledger(path, changed, 3.0, 1e-5)
    with pytest.raises(FedloomError, match=r"grants silo 'north' epsilon 3 .* epsilon 4"):
        data_ledger(path, SILO, 4.0, 1e-5)
    assert data_ledger(tmp_path / "other.sqlite", changed, 3.0).accounts()[0].budget.delta == 1e-3


def test_a_grant_can_be_lowered_but_not_raised(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    data_ledger(path, SILO, 3.0, 1e-5).close()
    lowered, paid = data_ledger(path, SILO, 1.0, 1e-5), 0
    while Budget(1.0, 1e-5, "filter").allows([EVENT] * (paid + 1)):
        lowered.charge_all(f"run-{paid}", "north", 1, {"update": EVENT}, content=None)
        paid += 1
    with pytest.raises(BudgetSpentError, match=r"beyond 1 \(delta 1e-05\)|budget of epsilon 1 "):
        lowered.charge_all("one too many", "north", 1, {"update": EVENT}, content=None)
    lowered.close()
    data_ledger(path, SILO, 3.0, 1e-5).charge_all("again", "north", 1, {"update": EVENT}, content=None)
    with pytest.raises(GrantError, match=r"grants silo 'north' epsilon 3 .* epsilon 4"):
        data_ledger(path, SILO, 4.0, 1e-5)


@pytest.mark.parametrize("epsilon", [3.0, 1.0])
def test_records_and_subjects_are_not_counted_in_one_ledger(tmp_path: Path, epsilon: float) -> None:
    path = tmp_path / "ledger.sqlite"
    data_ledger(path, SILO, 3.0, 1e-5, unit="subject").close()
    data_ledger(path, SILO, epsilon, 1e-5, unit="subject").close()
    with pytest.raises(GrantError, match=r"keeps account of each subject of silo 'north', but privacy.unit = 'record'"):
        data_ledger(path, SILO, epsilon, 1e-5)


def test_what_was_only_counted_can_be_bounded_later(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    data_ledger(path, SILO, math.inf, 1e-5).close()
    ledger = data_ledger(path, SILO, 0.001, 1e-5)
    with pytest.raises(BudgetSpentError, match=r"budget of epsilon 0\.001 .* is smaller than the cost of one round"):
        ledger.charge_all("run", "north", 1, {"update": EVENT}, content=None)
