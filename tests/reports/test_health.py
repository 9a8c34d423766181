"""How silos of a deployment are, and how much of their budget is spent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiment import load
from fedloom.privacy.accounting import Budget, Gaussian
from fedloom.privacy.ledger import Ledger, read_accounts
from fedloom.reports.health import SiloHealth, health_of
from html_pages import Page


def event(round_number: int, silo: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"round": round_number, "silo": silo, "event": kind, **more}


JOURNAL = [
    event(1, "north", "asked", bytes=900),
    event(1, "south", "asked", bytes=900),
    event(1, "north", "answered", seconds=2.0, bytes=100),
    event(1, "south", "missing", reason="the round went on without it"),
    event(2, "north", "asked"),
    event(2, "north", "failed", reason="out of memory", seconds=1.0),
    event(2, "north", "asked"),
    event(2, "north", "answered", seconds=4.0, bytes=150),
    event(2, "south", "late", reason="in round 3", seconds=9.0, bytes=70),
    event(3, "north", "asked"),
    event(3, "south", "refused", reason="its budget is spent"),
]


def test_the_last_word_about_a_round_counts() -> None:
    assert health_of(JOURNAL) == (
        SiloHealth("north", {1: "answered", 2: "answered", 3: "asked"}, 3.0, 250, "round 2, failed: out of memory"),
        SiloHealth("south", {1: "missing", 2: "late", 3: "refused"}, None, 0, "round 3, refused: its budget is spent"),
    )
    assert [silo.answered for silo in health_of(JOURNAL)] == [2, 0]


def test_a_silo_that_is_asked_again_after_trouble_stays_in_trouble_until_it_answers() -> None:
    (silo,) = health_of([event(1, "a", "asked"), event(1, "a", "failed"), event(1, "a", "asked")])
    assert (silo.rounds, silo.trouble) == ({1: "failed"}, "round 1, failed")


@pytest.mark.parametrize(
    "row",
    [
        {"round": 1, "silo": 5, "event": "answered"},
        {"round": 1, "silo": "x", "event": "<b>"},
        {"round": 1, "event": "answered"},
    ],
)
def test_odd_rows_are_passed_over(row: dict[str, Any]) -> None:
    assert health_of([row]) == ()


def test_odd_numbers_do_no_harm() -> None:
    (silo,) = health_of(
        [event(1, "x", "answered", seconds="soon", bytes=float("inf")), event(2, "x", "answered", bytes=-1)]
    )
    assert (silo.seconds, silo.bytes_up) == (None, 0)


def test_the_page_has_a_sign_for_each_round(run_folder: Path, reported: Callable[..., Page]) -> None:
    rows = [*JOURNAL, event(4, "south", "rejected", reason="<script>alert(1)</script>")]
    (run_folder / "silos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = reported(run_folder)
    page.assert_harmless()
    beats = [span["aria-label"] for span in page.all("span") if span.get("class", "").startswith("beat ")]
    assert beats == [
        *("round 1: answered", "round 2: answered", "round 3: asked"),
        *("round 1: missing", "round 2: late", "round 3: refused", "round 4: rejected"),
    ]
    assert "2 of 3" in page.text
    assert "round 4, rejected: <script>alert(1)</script>" in page.text
    assert [silo["silo"] for silo in page.numbers["runs"][0]["health"]] == ["north", "south"]


def test_a_bar_shows_how_much_of_a_budget_is_spent(run_folder: Path, reported: Callable[..., Page]) -> None:
    toml = run_folder / "run.toml"
    toml.write_text(toml.read_text().replace('mechanism = "none"', 'mechanism = "dp-sgd"'))
    ledger = Ledger(run_folder / "ledger.sqlite")
    for silo, epsilon in (("mnist-0", 8.0), ("mnist-1", float("inf"))):
        ledger.enrol(silo, "digest", Budget(epsilon, 1e-5, "rdp"))
        ledger.charge("run", silo, 1, "update", Gaussian(1.0), content=None)
    ledger.close()
    load(run_folder).folder.note({"noise": "secret"})
    (run_folder / "egress.jsonl").write_text("")  # nothing left that was not charged for
    spent = read_accounts(run_folder / "ledger.sqlite")[0].spent
    page = reported(run_folder)
    (meter,) = page.all("meter")  # none where there is no limit
    assert meter == {"min": "0", "max": "8", "high": "6.4", "value": f"{spent:g}"}
    assert f"{spent / 8:.0%}" in page.text
    assert "unlimited" in page.text
