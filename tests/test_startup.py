"""How a start is judged by benchmarks/startup.py, and what was kept of it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(("clock", "met"), [((0.9, 0.3, 0.7), True), ((0.31, 0.4, 0.5), False)])
def test_a_bar_is_met_by_the_clock_at_its_best(
    clock: tuple[float, ...], met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    row = runpy.run_path(str(BENCHMARKS / "startup.py"))["row"]
    for processor in ((0.1,), (0.9,)):  # which is shown and does not count
        found = row("import fedloom", clock, processor, 0.3)
        assert found["met"] is met
        assert (found["best_clock_s"], found["median_processor_s"]) == (min(clock), *processor)
    assert row("python -c pass", clock, (0.1,), None)["met"] is None


def test_what_was_kept_is_judged_alike() -> None:
    rows = json.loads((BENCHMARKS / "results" / "startup-cpu.json").read_text(encoding="utf-8"))["rows"]
    barred = [row for row in rows if row["bar_s"] is not None]
    assert {row["start"] for row in barred} > {"import fedloom", "fedloom --help"}
    assert all(row["met"] and row["best_clock_s"] <= row["bar_s"] for row in barred)
