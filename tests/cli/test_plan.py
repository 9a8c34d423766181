"""What a run takes, told before it: bytes to the last one, several GPUs by arithmetic, and beside what happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cli.conftest import Command
from fedloom.experiment import RunEstimate, estimate, train
from fedloom.experiment.projection import assumptions, project
from support import tiny_config

FOUND = RunEstimate(
    engine="fused on a GPU",
    silos=1000,
    records=96_000,
    parameters=1_000_000,
    rounds=10,
    silos_per_round=256,
    steps_per_round=256 * 30,
    seconds_per_round=1.0 + 316.0,
    seconds_beside_steps=1.0,
    bytes_up=1,
    bytes_down=1,
    parameters_of_a_silo=2_000_000,
    bytes_of_a_silo=1000,
    convolutions=False,
    chunk=128,
    memory=1,
    bytes_per_checkpoint=1,
    tried_steps=1,
)


@pytest.mark.parametrize(
    "settings",
    [
        ("method.name=fissionvae", "participation.rate=0.5"),
        ("method.name=fedvae", "sharing.compression=int8"),
        ("method.name=class_vae", "participation.rate=0.7"),  # which sends label counts in a silo's first round
    ],
)
def test_bytes_are_those_of_the_run(settings: tuple[str, ...], tmp_path: Path) -> None:
    config = tiny_config(*settings, "rounds=2", "evaluation.metrics=['cost']")
    found, run = estimate(config), train(config, tmp_path / "run")
    metrics = run.metrics()[-1]
    assert found.bytes_up == sum(row["bytes"] for row in run.folder.egress()) == metrics["cost/bytes-up/n2"] > 0
    assert found.bytes_down == metrics["cost/bytes-down/n2"]
    assert found.parameters_of_a_silo == metrics["cost/parameters/n2"]
    assert found.silos_per_round == round(sum(len(row["participants"]) for row in run.metrics()) / 2)


def test_several_gpus_are_projected_from_what_this_one_took() -> None:
    # 256 silos in two turns cost what 316 would that nobody waits for, 30 steps each: 1/30 s a silo's step.
    one, two, many = (project(FOUND, gpus) for gpus in (1, 2, 200))
    assert one.seconds_per_round == pytest.approx(317.0)  # as measured
    between = 2 * 8 * 1_000_000
    assert (one.bytes_between, two.bytes_between, many.bytes_between) == (0, between, 199 * between)
    assert two.seconds_per_round == pytest.approx(1.0 + (128 + 30) + between / 2 / 20e9)
    assert many.seconds_per_round == pytest.approx(1.0 + (2 + 30) + 199 / 200 * between / 20e9)
    assert (one.memory, many.memory) == (128 * (8 * 4 * 2_000_000 + 1000), 2 * (8 * 4 * 2_000_000 + 1000))


def test_without_a_gpu_the_constants_are_those_of_an_h200() -> None:
    on_cpu = replace(FOUND, chunk=0)
    assert project(on_cpu, 2).seconds_per_round == pytest.approx(1.0 + 18e-6 * 2 * 158 * 30 + 16e6 / 2 / 20e9)
    assert "each GPU is an H200, on which a silo with batches of 32 adds 36 us to a step" in assumptions(on_cpu)[0]
    assert "as fast as this one" in assumptions(FOUND)[0]


def test_a_plan_is_told_with_what_it_assumes(fedloom: Command, tiny_toml: Path) -> None:
    found = json.loads(fedloom("plan", tiny_toml, "--gpus", 2, "--gpus", 8, "--json").stdout)
    assert [each["gpus"] for each in found["gpus"]] == [2, 8]
    assert len(found["assumed"]) == 5
    shown = fedloom("plan", tiny_toml, "--gpus", 8).stdout
    assert "MB up" in shown or "kB up" in shown
    assert shown.count("assumed: ") == 5


def test_the_plan_of_a_run_stands_beside_what_it_took(fedloom: Command, tmp_path: Path) -> None:
    run = train(tiny_config(), tmp_path / "run")
    found = json.loads(fedloom("plan", tmp_path / "run", "--json").stdout)
    sent = sum(row["bytes"] for row in run.folder.egress())
    assert found["measured"]["bytes_up_per_round"] == found["bytes_up"] / 2 == sent / 2
    assert found["measured"]["steps_per_round"] == found["steps_per_round"] == run.metrics()[0]["steps"]
    assert found["measured"]["memory"] == run.folder.environment["memory"] > 0
    assert "planned here" in fedloom("plan", tmp_path / "run").stdout


def test_a_run_is_planned_as_it_is(finished: Path, refused: Callable[..., str]) -> None:
    assert "is a run, whose settings stand; rounds=9 is for a preset or a file" in refused("plan", finished, "rounds=9")
