"""The sentence that everything about a run opens with, on samples of which everybody knows what to think."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.config import load_config
from fedloom.engines.base import initial_state
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.judgement import judge
from fedloom.evaluation.suite import Evaluator
from fedloom.experiment import load
from fedloom.experiment.experiment import Experiment
from fedloom.methods.generator import Generator
from fedloom.reports.verdict import Circumstances, Judged, read_judged, verdict, verdict_of

PUBLIC = Circumstances("no DP guarantee", guaranteed=False, public=True)
JUDGED = Judged(groups={"all": {"samples": 1000, "distance": 0.1, "floor": 0.1, "average": 0.5, "copies": 0.0}})


@pytest.fixture(scope="module")
def digits() -> Evaluation:
    """An untrained generator beside the digits of the sample; a case gives it other samples."""
    settings = ["data.source=mnist-sample", "data.silos=1", "method.name=fedvae", "model.hidden=[4]", "model.latent=2"]
    experiment = Experiment.of(load_config("demo", settings))
    federation, method = experiment.federation, experiment.method
    state = initial_state(method, federation, experiment.config)
    generator = Generator(method, state.server, federation.groups, federation.classes, federation.modality.name)
    evaluator = Evaluator(federation, experiment.config.evaluation, experiment.streams)
    return evaluator.evaluation(generator)


def judged(evaluation: Evaluation, samples: Tensor, folder: Path) -> Judged:
    """What is found of these samples, read back from the file that keeps it."""
    case = replace(evaluation)
    vars(case)["samples"] = {"mnist": samples}
    (folder / "verdict.json").write_text(json.dumps(judge(case, 1), allow_nan=False))
    found = read_judged(folder / "verdict.json")
    return replace(found, groups={g: {**row, "active": None} for g, row in found.groups.items()})  # it is not trained


def training(evaluation: Evaluation) -> Tensor:
    return evaluation.real.training["mnist"].values


def held_out(evaluation: Evaluation) -> Tensor:
    return evaluation.real.held_out["mnist"].values


def noise(evaluation: Evaluation) -> Tensor:
    return torch.rand(1000, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def average(evaluation: Evaluation) -> Tensor:
    return training(evaluation).mean(dim=0, keepdim=True).expand(1000, -1, -1, -1)


def nearly_average(evaluation: Evaluation) -> Tensor:
    """As a decoder of one round gives: a tenth of the variety."""
    return average(evaluation) + 0.1 * (training(evaluation)[-1000:] - average(evaluation))


def some_copied(evaluation: Evaluation) -> Tensor:
    return torch.cat([training(evaluation)[:200], held_out(evaluation)[:800]])


CASES: dict[str, tuple[Callable[[Evaluation], Tensor], str, str]] = {
    "held-out records": (held_out, "green", "samples come near to real records (100% of the way from their average"),
    "one average image": (average, "red", "hardly nearer to real records than one average image"),
    "a tenth of the variety": (nearly_average, "red", "11% of the way from their average, 10% of their variety"),
    "noise": (noise, "red", "samples are farther from real records than their average is"),
    "training records": (lambda evaluation: training(evaluation)[:1000], "red", "100% of the samples of mnist may be"),
    "some training records": (some_copied, "amber", "20% of the samples of mnist may be copies of training records"),
    "nothing finite": (lambda _: torch.full((1000, 1, 28, 28), torch.nan), "red", "samples are no finite numbers"),
    "a handful": (lambda evaluation: held_out(evaluation)[:99], "amber", "99 samples of a group are too few"),
}


@pytest.mark.parametrize("case", CASES)
def test_samples_of_which_everybody_knows(digits: Evaluation, tmp_path: Path, case: str) -> None:
    samples, tone, words = CASES[case]
    found = verdict(judged(digits, samples(digits), tmp_path), PUBLIC)
    assert (found.tone, words in found.sentence) == (tone, True), found
    assert found.sentence.endswith("; no DP guarantee.")


def changed(**row: float) -> Judged:
    return replace(JUDGED, groups={"all": {**JUDGED.groups["all"], **row}})


WAYS = [  # floor 0.1 and average 0.5: four fifths of the way are at 0.18, one fifth at 0.42
    (changed(distance=0.179), "green"),
    (changed(distance=0.181), "amber"),
    (changed(distance=0.419), "amber"),
    (changed(distance=0.421), "red"),
    (changed(spread=0.049), "red"),
    (changed(sharpness=0.49), "amber"),
    (changed(sharpness=2.01), "amber"),
    (changed(sharpness=0.51), "green"),
    (changed(active=0, latent=20), "red"),
    (changed(active=2, latent=20), "amber"),
    (changed(active=3, latent=20), "green"),
    (changed(copies=0.05), "green"),
    (changed(copies=0.051), "amber"),
    (changed(copies=0.51), "red"),
    (replace(JUDGED, utility={"samples": 0.75, "records": 0.9, "chance": 0.1}), "green"),
    (replace(JUDGED, utility={"samples": 0.73, "records": 0.9, "chance": 0.1}), "amber"),
    (replace(JUDGED, utility={"samples": 0.25, "records": 0.9, "chance": 0.1}), "red"),
    (replace(JUDGED, utility={"samples": 0.73, "records": None, "chance": 0.1}), "amber"),
    (Judged(missing="there are no held-out records to compare samples with"), "amber"),
]


@pytest.mark.parametrize(("numbers", "tone"), WAYS)
def test_the_worst_decides(numbers: Judged, tone: str) -> None:
    assert verdict(numbers, PUBLIC).tone == tone


@pytest.mark.parametrize(
    ("about", "tone", "words"),
    [
        (replace(PUBLIC, public=False), "amber", "no DP guarantee, and the data are not public."),
        (Circumstances("epsilon 3", guaranteed=True, public=False), "green", "no sign of copying; epsilon 3."),
        (replace(PUBLIC, refuted=True), "red", "the claim of privacy was refuted by an attack; no DP guarantee."),
        (replace(PUBLIC, state={"state": "diverged", "round": 3, "reason": "x"}), "red", "diverged in round 3 (x)"),
    ],
)
def test_privacy_and_state_have_their_say(about: Circumstances, tone: str, words: str) -> None:
    found = verdict(JUDGED, about)
    assert (found.tone, words in found.sentence) == (tone, True), found


def test_a_domain_that_is_hit_is_no_success(run_folder: Path) -> None:
    log = run_folder / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows[-1] |= {f"domain-hit/domain-cnn/n1000/group={group}": 1.0 for group in ("mnist", "fashion-mnist")}
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judgement = json.loads((run_folder / "verdict.json").read_text())
    for row in judgement["groups"].values():
        row |= {"samples": 1000, "spread": 0.06, "distance": 0.49, "floor": 0.1, "average": 0.5}
    (run_folder / "verdict.json").write_text(json.dumps(judgement))
    found = verdict_of(load(run_folder).folder)
    assert (found.tone, "own group" in found.sentence) == ("red", False)


STRANGE: list[Any] = [[], {"groups": 3, "utility": [], "round": "x"}, {"groups": {"<b>": {"distance": "1"}}}, None]
HOSTILE = [*map(json.dumps, STRANGE), "{", "[" * 100_000, '{"groups": {"a": {"samples": 1e999}}}']


@pytest.mark.parametrize("content", HOSTILE)
def test_a_damaged_file_is_no_praise(run_folder: Path, content: str) -> None:
    (run_folder / "verdict.json").write_text(content)
    assert verdict_of(load(run_folder).folder).tone != "green"


def test_a_run_and_a_later_evaluation_find_the_same(run_folder: Path) -> None:
    written = (run_folder / "verdict.json").read_text()
    (run_folder / "verdict.json").unlink()
    load(run_folder).evaluate()
    assert (run_folder / "verdict.json").read_text() == written
