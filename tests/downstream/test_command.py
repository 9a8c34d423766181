"""``fedloom downstream``, and where what it finds is shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from downstream.gaussians import CLASSES, config, records
from fedloom.cli import app
from fedloom.reports.downstream import DownstreamFacts, read_downstream


def fedloom(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two silos on a file of embeddings."""
    folder = tmp_path_factory.mktemp("command")
    train, test = records(1, 60, 60, 60), records(2, 30, 30, 30)
    both = {"train": train, "test": test}
    names = np.array(CLASSES)
    arrays = {"x_train": train.x.numpy(), "y_train": names[train.y], "x_test": test.x.numpy(), "y_test": names[test.y]}
    arrays |= {f"attribute_side_{split}": np.where(t.x[:, 5] > 0, "up", "down") for split, t in both.items()}
    np.savez(folder / "vectors.npz", **arrays)
    settings = ("data.source=embeddings", f"data.path={folder / 'vectors.npz'}", "data.partition=iid", "data.silos=2")
    toml = folder / "run.toml"
    toml.write_text(config("moments", *settings, "data.validation=0.25").to_toml(), encoding="utf-8")
    result = fedloom("run", toml, "--out", folder / "run")
    assert result.exit_code == 0, result.output
    return folder / "run"


@pytest.fixture(scope="module")
def found(run: Path) -> dict[str, Any]:
    result = fedloom("downstream", run, "--synthetic", "300", "--json")
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def test_the_table_says_what_was_scored_on_what(run: Path, found: dict[str, Any]) -> None:
    printed = fedloom("downstream", run, "--synthetic", "300").stdout
    assert f"{run}, round 1, moments\nprivacy: no DP guarantee\n" in printed
    accuracy = f"{100 * found['rows']['mixture']['global']['accuracy']:.1f}"
    (line,) = [line for line in printed.splitlines() if line.startswith("mixture ") and "minus" not in line]
    assert line.split()[1] == accuracy
    worst = f"{100 * found['rows']['mixture']['global']['worst_group']:.1f}"
    assert line.split()[4] == worst
    for words in (
        "ACC",
        "BACC",
        "WORST",
        "groups are classes\n",
        "global",
        "all held-out records",
        "weighed as each silo's classes are",
        "lambda: ",
    ):
        assert words in printed


def test_an_attribute_that_no_class_tells_makes_groups_too(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    printed = fedloom("downstream", folder, "--attribute", "side", "--synthetic", "50").stdout
    assert "groups are classes under each side\n" in printed
    found = json.loads((folder / "downstream.json").read_text(encoding="utf-8"))
    assert list(found["groups"]["centralised"]) == [
        f"{kind}|side={side}" for kind in CLASSES for side in ("down", "up")
    ]
    assert found["rows"]["centralised"]["global"]["worst_group"] == min(found["groups"]["centralised"].values())


def test_the_report_tells_the_guarantee_of_what_was_let_out(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    assert fedloom("downstream", folder, "--lambda", "shared", "--synthetic", "50").exit_code == 0
    assert fedloom("report", folder).exit_code == 0
    assert "Privacy: no DP guarantee: for one lambda for all, exact counts" in (folder / "report.html").read_text(
        "utf-8"
    )


def test_inspect_and_report_show_it(run: Path, found: dict[str, Any]) -> None:
    kept = {key: value for key, value in found.items() if key != "privacy"}
    assert json.loads(fedloom("inspect", run, "--json").stdout)["downstream"] == kept
    assert "synthetic-only+prior" in fedloom("inspect", run).stdout
    result = fedloom("report", run)
    assert result.exit_code == 0, result.output
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "What it is good for" in page
    assert f"{100 * found['rows']['centralised']['silo']['macro_f1']:.1f}" in page


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--lambda", "each"), "Error: --lambda: unknown choice 'each'"),
        (("--synthetic", "0"), "Error: --synthetic = 0 must be at least 1"),
        (("--round", "7"), "Error: "),
    ],
)
def test_a_mistake_is_one_sentence(run: Path, arguments: tuple[str, ...], sentence: str) -> None:
    before = (run / "downstream.json").read_bytes() if (run / "downstream.json").exists() else b""
    result = fedloom("downstream", run, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1
    assert before == ((run / "downstream.json").read_bytes() if before else b"")


def test_facts_are_read_back(run: Path, found: dict[str, Any]) -> None:
    facts = read_downstream(run / "downstream.json")
    assert len(facts.lambdas) == 2
    for row, tests in found["rows"].items():
        for test in ("global", "silo"):
            assert facts.rows[row][test] == {name: tests[test][name] for name in facts.rows[row][test]}
    assert facts.rows["mixture minus silo-only"]["silo"]["accuracy"] == found["gain"]["silo"]["accuracy"]


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"rows": 3, "gain": [], "silos": {}, "tests": null, "sentences": "x"}',
        '{"silos": [1, {"lambda": 3}, {"lambda": {"mixture": "x"}}]}',
    ],
)
def test_hostile_files_say_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "downstream.json").write_text(text)
    assert read_downstream(tmp_path / "downstream.json") == DownstreamFacts()


def test_odd_values_within_rows_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "downstream.json").write_text('{"rows": {"a": {"global": {"accuracy": "x", "macro_f1": 0.5}}, "b": 1}}')
    assert read_downstream(tmp_path / "downstream.json").rows == {
        "a": {"global": {"macro_f1": 0.5}, "silo": {}},
        "b": {"global": {}, "silo": {}},
    }
