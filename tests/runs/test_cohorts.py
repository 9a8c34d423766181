from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.runs.cohorts import Summary, cohorts
from fedloom.runs.folder import RunFolder
from support import tiny_config

HIT = "domain-hit/domain-cnn/n10/group=a"


def run_with(path: Path, value: float | None, *overrides: str) -> RunFolder:
    """A folder whose only round has the metric."""
    folder = RunFolder.create(path, tiny_config(*overrides))
    metrics = {} if value is None else {HIT: value}
    folder.record_round({"round": 1, "seconds": 0.1, "train/vae/loss": 5.0, **metrics}, [])
    return folder


def test_runs_that_differ_only_in_seed_are_one_experiment(tmp_path: Path) -> None:
    runs = [
        run_with(tmp_path / "a1", 1.0, "seed=1"),
        run_with(tmp_path / "b1", 10.0, "seed=1", "method.prior=wave"),
        run_with(tmp_path / "a2", 2.0, "seed=2", "name='another name'", "engine.threads=1"),
        run_with(tmp_path / "a3", 6.0, "seed=3"),
    ]
    one, other = cohorts(runs)
    assert [run.path.name for run in one.runs] == ["a1", "a2", "a3"]
    assert (one.seeds, other.seeds) == ((1, 2, 3), (1,))
    # Mean 3; squared differences 4, 1 and 9 over two: variance 7.
    assert one.metrics() == {HIT: Summary(3.0, pytest.approx(7**0.5), 3)}
    assert other.metrics() == {HIT: Summary(10.0, None, 1)}


def test_the_same_seed_twice_is_no_repetition(tmp_path: Path) -> None:
    runs = [run_with(tmp_path / str(number), 1.0, f"seed={seed}") for number, seed in enumerate((1, 1, 2))]
    assert [cohort.seeds for cohort in cohorts(runs)] == [(1, 2), (1,)]


def test_a_run_without_the_metric_does_not_count(tmp_path: Path) -> None:
    runs = [run_with(tmp_path / str(seed), value, f"seed={seed}") for seed, value in ((1, None), (2, 4.0))]
    (cohort,) = cohorts(runs)
    assert cohort.metrics() == {HIT: Summary(4.0, None, 1)}


def test_newest_metrics_come_from_the_run_and_from_later_evaluations(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", 0.1)
    folder.record_round({"round": 2, "seconds": 0.1, HIT: 0.2}, [])
    folder.record_round({"round": 3, "seconds": 0.1}, [])
    folder.record_evaluation(1, {"frechet/pixels/n10": 9.0, "kernel/pixels/n10": 8.0}, 1.0)
    assert folder.latest_metrics() == {HIT: 0.2, "frechet/pixels/n10": 9.0, "kernel/pixels/n10": 8.0}
    folder.record_evaluation(1, {HIT: 0.3}, 1.0)
    assert folder.latest_metrics()[HIT] == 0.2  # an older round does not replace a newer one
    folder.record_evaluation(3, {HIT: 0.4}, 1.0)
    folder.record_evaluation(3, {HIT: 0.5}, 2.0)
    assert folder.latest_metrics() == {HIT: 0.5}
    lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {"round": 3, "key": HIT, "value": 0.5, "seconds": 2.0}


def test_an_evaluation_that_was_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", None)
    folder.record_evaluation(1, {HIT: 0.1}, 1.0)
    with (folder.path / "evaluations.jsonl").open("a") as file:
        file.write('{"round": 1, "key": "fre')
    folder.record_evaluation(1, {HIT: 0.3, "kernel/pixels/n10": 8.0}, 1.0)
    assert [(row["key"], row["value"]) for row in folder.evaluations()] == [
        (HIT, 0.1),
        (HIT, 0.3),
        ("kernel/pixels/n10", 8.0),
    ]
