"""Runs that take long: estimated before, in the background, looked after, stopped at any moment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cli.conftest import Command
from fedloom.cli.progress import RoundProgress
from fedloom.experiment import estimate, train
from fedloom.experiment.estimation import _extended
from fedloom.experiment.states import server_state
from fedloom.runs.at_work import worker_of
from fedloom.runs.checkpoint import load_checkpoint
from support import tiny_config


def test_an_estimate_counts_what_the_run_would_do_and_leaves_nothing(registry: Path, tmp_path: Path) -> None:
    private = tiny_config("privacy.mechanism=dp-sgd", "privacy.epsilon=5", "local.epochs=2", "rounds=7")
    found = estimate(private)
    assert (found.silos, found.records, found.rounds) == (4, 160, 7)
    assert found.steps_per_round == 4 * 2 * 3  # 40 records in batches of 16
    assert found.tried_steps == 4 * (3 + 3 + 9)
    assert found.bytes_per_checkpoint == 4 * found.parameters  # silos keep nothing
    checkpoint = load_checkpoint(train(private, tmp_path / "run").folder.path)
    blocks = server_state(checkpoint).blocks.values()
    assert found.parameters == sum(tensor.numel() for block in blocks for tensor in block.values())
    assert found.memory > 1_000_000
    assert found.seconds == 7 * found.seconds_per_round > 0


def test_an_estimate_charges_nobody(registry: Path) -> None:
    estimate(tiny_config("privacy.mechanism=dp-sgd", "privacy.epsilon=5"))
    assert not registry.exists()


def test_steps_that_were_tried_are_extended_to_all() -> None:
    assert _extended((12, 1.5), (36, 2.5), 100) == pytest.approx(1.0 + 100 / 24)  # 1 s beside the steps
    assert _extended((12, 1.0), (36, 0.9), 100) == 1.0  # no step takes time back
    assert _extended((0, 1.0), (0, 2.0), 0) == 2.0


def test_a_dry_run_writes_nothing(fedloom: Command, tiny_toml: Path, tmp_path: Path) -> None:
    result = fedloom("run", tiny_toml, "--dry-run", "--json", "--out", tmp_path / "run")
    assert json.loads(result.stdout)["rounds"] == 2
    assert not (tmp_path / "run").exists()
    assert "would take about 0:0" in fedloom("run", tiny_toml, "--dry-run").stdout


def test_without_a_terminal_each_round_is_a_line(tmp_path: Path) -> None:
    file = StringIO()
    with RoundProgress(Console(file=file, width=40)) as progress:
        train(tiny_config("evaluation.metrics=['spread']", "evaluation.every=2"), tmp_path / "run", observer=progress)
    lines = file.getvalue().splitlines()
    assert lines[0] == "fissionvae on mixed-mnist-sample, 4 silos"
    assert re.fullmatch(r"round 1/2  loss \S+  nll \S+  kl \S+  0:0\d left", lines[2])
    assert re.fullmatch(r"round 2/2  loss \S+  nll \S+  kl \S+  spread \S+ / \S+  0:00 left", lines[3])
    assert len(lines) == 4


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Path]:
    """A configuration that would go on for hours; whoever is still at work on its run at the end is stopped."""
    file, run = tmp_path / "endless.toml", tmp_path / "runs" / "endless"
    file.write_text(tiny_config("rounds=5000", "engine.checkpoint_every=1").to_toml(), encoding="utf-8")
    yield file
    if worker := worker_of(run):
        os.kill(worker.process, signal.SIGKILL)


def test_a_run_in_the_background_is_looked_after_and_stopped(fedloom: Command, endless: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "endless"
    begun = fedloom("run", endless, "--detach", "--out", run)
    assert begun.exit_code == 0, begun.output
    worker = worker_of(run)
    assert worker is not None
    assert f"runs in the background as process {worker.process}" in begun.stdout
    while not list(run.glob("checkpoints/round-*")):
        time.sleep(0.02)
    (found,) = json.loads(fedloom("status", tmp_path / "runs", "--json").stdout)["runs"]
    assert (found["run"], found["state"], found["process"]) == ("endless", "running", worker.process)
    assert found["rounds"]["planned"] == 5000
    assert "round 1/5000" in (run / "output.log").read_text(encoding="utf-8")
    again = fedloom("resume", run)
    assert (again.exit_code, again.stderr.count("\n")) == (2, 1)
    assert f"process {worker.process} on " in again.stderr

    ended = fedloom("stop", run)
    assert (ended.exit_code, ended.stdout) == (0, f"stopped; 'fedloom resume {run}' goes on\n")
    assert worker_of(run) is None
    assert (run / "output.log").read_text(encoding="utf-8").endswith(f"stopped; `fedloom resume {run}` goes on\n")
    shown = fedloom("status", run)
    assert re.search(r"fissionvae is stopped, \d+ of 5,000 rounds done, .* left\n", shown.stdout)
    assert f"fedloom resume {run}" in shown.stdout
    assert "endless" in fedloom("status", tmp_path / "runs").stdout
    assert fedloom("stop", run).stdout == f"no process is at work on {run}\n"


def test_what_fails_at_once_in_the_background_says_so_here(fedloom: Command, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(tiny_config("data.source=npz", "data.path=nowhere.npz").to_toml(), encoding="utf-8")
    result = fedloom("run", file, "--detach", "--out", tmp_path / "runs" / "wrong")
    assert result.exit_code == 2
    assert "data.path = 'nowhere.npz' does not exist" in result.stderr
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("command", ["run", "resume"])
def test_a_federation_is_not_detached(command: str, fedloom: Command, finished: Path, tmp_path: Path) -> None:
    source = "demo" if command == "run" else finished
    result = fedloom(command, source, "--detach", "--federation", tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "for runs on this machine" in result.stderr


def test_there_is_nothing_to_look_after(fedloom: Command, tmp_path: Path) -> None:
    for folder, message in ((tmp_path / "none", "there is no folder"), (tmp_path, "holds no run")):
        result = fedloom("status", folder)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert message in result.stderr


def interrupted(file: Path, out: Path, seconds: float, number: int, times: int = 1) -> subprocess.CompletedProcess[str]:
    """Start a run and interrupt it after some time."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom", "run", str(file), "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
    )
    time.sleep(seconds)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.02)
    stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess("run", process.returncode, stdout, stderr)


def test_a_scheduler_that_ends_a_run_loses_nothing(endless: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "endless"
    begun = subprocess.Popen(
        [sys.executable, "-m", "fedloom", "run", str(endless), "--out", str(run)],
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(run.glob("checkpoints/round-*")):
        assert begun.poll() is None
        time.sleep(0.02)
    begun.send_signal(signal.SIGTERM)
    _, stderr = begun.communicate(timeout=60)
    assert begun.returncode == 130
    assert stderr.splitlines()[-1] == f"stopped; `fedloom resume {run}` goes on"
    assert "Traceback" not in stderr


@pytest.mark.system
@pytest.mark.parametrize("seconds", [0.6, 0.9, 1.2, 1.6, 2.0, 2.5, 3.0, 4.0, 5.0])
@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_is_quiet_at_any_moment(seconds: float, times: int, endless: Path, tmp_path: Path) -> None:
    """Also before torch is imported, and where somebody is impatient; earlier Python itself is not up."""
    found = interrupted(endless, tmp_path / "runs" / "endless", seconds, signal.SIGINT, times)
    assert found.returncode in (130, -signal.SIGINT)  # the interpreter itself was not up yet
    assert "Traceback" not in found.stderr
    if found.returncode == 130:
        assert found.stderr.splitlines()[-1].startswith("stopped")
        assert sum(line.startswith("stopped") for line in found.stderr.splitlines()) == 1
