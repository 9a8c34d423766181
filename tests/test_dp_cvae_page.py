"""The figures and commands on DP-CVAE's pages against what was stored and what exists."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from fedloom.config import load_config

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "papers/dp-cvae/appendix.md").read_text(encoding="utf-8")
ROWS = json.loads((ROOT / "benchmarks/results/dp_cvae-cpu.json").read_text(encoding="utf-8"))["rows"]
HOUSE = ("moments", "refined_moments", "dp_cvae, linear")


def table(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its title row."""
    section = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line] for line in lines[1:]]


def stored(**facts: Any) -> list[dict[str, Any]]:
    return [row for row in ROWS if facts.items() <= row.items()]


def shown(values: Sequence[float]) -> str:
    percent = [100 * value for value in values]
    spread = f" ± {stdev(percent):.1f}" if len(percent) > 1 else ""
    return f"{mean(percent):.1f}{spread}" if percent else "-"


def accuracy(**facts: Any) -> str:
    return shown([row["accuracy"] for row in stored(partition="iid", **facts)])


def test_figures_at_a_true_epsilon_are_those_stored() -> None:
    rows = table("At a true epsilon")
    assert len(rows) == 4
    for records, epsilon, noise, _, *cells in rows:
        facts = {"records": int(records.replace(",", "")), "epsilon": float(epsilon), "trust": noise}
        assert cells == [accuracy(method=method, **facts) for method in HOUSE]
        assert "±" in cells[0]


def test_no_run_spent_more_than_it_says() -> None:
    private = [row for row in ROWS if row["epsilon"] is not None]
    assert len(private) > 30
    assert all(0.9 * row["epsilon"] < row["spent"] <= row["epsilon"] for row in private)


def test_figures_of_the_mixture_are_those_stored() -> None:
    rows = table("The mixture where silos differ")
    assert len(rows) == 2
    for noise, *cells in rows:
        found = [row["downstream"] for row in stored(partition="dirichlet", trust=noise, epsilon=4.0)]
        heads = ("silo-only", "synthetic-only", "mixture", "mixture, balanced lambda")
        own, other, mixed, balanced = ([each[head]["silo"]["balanced_accuracy"] for each in found] for head in heads)
        gain, balanced_gain = ([a - b for a, b in zip(each, own, strict=True)] for each in (mixed, balanced))
        assert cells == [shown(each) for each in (own, other, mixed, gain, balanced, balanced_gain)]


def test_figures_of_the_long_tail_are_those_stored() -> None:
    rows = table("A long tail of classes")
    assert len(rows) == 6
    for method, exponent, *cells in rows:
        found = [row["exponents"][exponent] for row in stored(data="long-tail", method=method)]
        names = ("accuracy", "balanced_accuracy", "worst_group")
        assert cells == [shown([each[name] for each in found]) for name in names]


def test_figures_of_the_attribute_are_those_stored() -> None:
    rows = table("An attribute that goes with the class")
    assert len(rows) == 5
    for method, *cells in rows:
        found = [row["downstream"]["synthetic-only"]["global"] for row in stored(data="habitat", method=method)]
        assert cells == [shown([each[name] for each in found]) for name in ("accuracy", "worst_group")]


# What is not a method's own accuracy: which run, and which of its heads.
HEADS = {
    "fedprox": ("fedprox", "federated"),
    "dp logistic regression": ("dp logistic regression", "federated"),
}


def test_figures_of_the_baselines_are_those_stored() -> None:
    rows = table("Baselines")
    assert len(rows) >= 7
    for name, records, epsilon, noise, cell in rows:
        method, head = HEADS.get(name, (name, ""))
        facts = {"records": int(records.replace(",", "")), "epsilon": None if epsilon == "infinity" else float(epsilon)}
        facts |= {} if noise == "-" else {"trust": noise}
        found = stored(method=method, partition="iid", **facts)
        values = [row["downstream"][head]["global"]["accuracy"] if head else row["accuracy"] for row in found]
        assert values
        assert cell == shown(values)


def test_figures_of_the_collapse_are_those_stored() -> None:
    rows = table("The collapse")
    assert len(rows) >= 3
    for model, *cells in rows:
        (found,) = stored(method=model, seed=11)
        expected = [f"{found['kl']:.2g}", f"{found['variance']:.3f}", f"{100 * found['accuracy']:.1f}"]
        assert cells == expected


def test_figures_against_epsilon_are_those_stored() -> None:
    rows = table("Other generators against epsilon")
    assert len(rows) == 7
    for epsilon, *cells in rows:
        facts = {"epsilon": None if epsilon == "infinity" else float(epsilon), "records": 1600, "trust": "local"}
        assert cells == [accuracy(method=method, seed=11, **facts) for method in ("moments", "dp_cvae, linear")]


@pytest.mark.parametrize("page", ["docs/dp-cvae.md", "papers/dp-cvae/appendix.md"])
def test_commands_on_pages_name_presets_and_settings_that_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = re.findall(r"fedloom run (dp-cvae[\w./-]*)((?: +[\w.]+=[^\s`]+)*)", text)
    assert len(commands) >= 2
    for preset, assignments in commands:
        load_config(preset, assignments.split())
