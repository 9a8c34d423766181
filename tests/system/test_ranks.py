"""Ranks as processes that torch's launcher starts: equal runs, deaths, restarts, and mistakes in a sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedloom.experiment import train
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from support import assert_same_run, tiny_config, wait_for

pytestmark = pytest.mark.system
TESTS = Path(__file__).parents[1]
DYING = TESTS / "engines" / "dying_rank.py"
KEEPING = ("rounds=4", "participation.rate=0.7", "local.keep_optimizer=true", "sharing.scopes.encoder=silo")
PRIVATE = ("privacy.mechanism=dp-sgd", "privacy.noise_multiplier=1.0", "privacy.accountant=rdp", "privacy.noise=test")
FUSED = ("engine.name=fused", "engine.workers=0")


def torchrun(ranks: int, *words: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return done([*start, f"--max-restarts={restarts}", *words])


def fedloom(*words: str) -> subprocess.CompletedProcess[str]:
    return done([sys.executable, "-m", "fedloom", *words])


def done(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]  # pytest keeps its own to itself
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


def file_of(folder: Path, *overrides: str) -> str:
    path = folder / "run.toml"
    path.write_text(tiny_config(*overrides).to_toml())
    return str(path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone") / "run"
    train(tiny_config(*KEEPING, *PRIVATE), path)
    return path


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_runs_of_any_number_of_ranks_are_equal(ranks: int, alone: Path, tmp_path: Path) -> None:
    done = torchrun(
        ranks, "-m", "fedloom", "run", file_of(tmp_path, *KEEPING, *PRIVATE), "--out", str(tmp_path / "run")
    )
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "run", alone)


def test_the_fused_engine_on_ranks_of_this_machine(tmp_path: Path) -> None:
    train(tiny_config(*KEEPING, *FUSED), tmp_path / "alone")
    done = fedloom("run", file_of(tmp_path, *KEEPING, *FUSED), "--out", str(tmp_path / "run"), "--ranks=2")
    assert (done.returncode, "on 2 ranks" in done.stdout) == (0, True), done.stderr
    assert_same_run(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize(("rank", "when"), [(0, 15), (0, 22), (1, 3)])
def test_a_rank_that_is_killed_ends_the_run_which_goes_on_on_others(
    rank: int, when: int, alone: Path, tmp_path: Path
) -> None:
    """At a write of rank 0, or while rank 1 trains; then with three ranks in place of two."""
    out = tmp_path / "run"
    words = ("run", file_of(tmp_path, *KEEPING, *PRIVATE), "--out", str(out))
    died = torchrun(2, str(DYING), str(rank), str(when), *words)
    assert died.returncode == 1
    said = [line for line in died.stderr.splitlines() if line.startswith(("Error:", "stopped"))]
    assert len(said) == (1 if rank else 0)  # who is killed says nothing, and who follows leaves it to the launcher
    assert RunFolder.open(out).status["state"] == "unfinished"
    assert 1 <= load_checkpoint(out).round <= 3
    again = fedloom("resume", str(out), "--ranks=3")
    assert again.returncode == 0, again.stderr
    assert_same_run(out, alone)


def test_a_run_that_is_stopped_leaves_nothing_of_its_silos_behind(tmp_path: Path) -> None:
    out, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    words = [sys.executable, "-m", "fedloom", "run", "demo", "rounds=2000", f"--out={out}", "--ranks=2"]
    with subprocess.Popen(words, env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: (out / "metrics.jsonl").is_file() and (out / "metrics.jsonl").stat().st_size > 0)
            assert list(scratch.glob("fedloom-rank-*"))
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert not list(scratch.glob("fedloom-rank-*"))


@pytest.mark.parametrize(("rank", "when"), [(0, 15), (1, 3)])
def test_the_launchers_restart_goes_on(rank: int, when: int, alone: Path, tmp_path: Path) -> None:
    words = ("run", file_of(tmp_path, *KEEPING, *PRIVATE), "--out", str(tmp_path / "run"))
    done = torchrun(2, str(DYING), str(rank), str(when), *words, restarts=1)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "run", alone)


def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    for words, sentence in {
        ("run", "nowhere.toml", "--ranks=2"): "nowhere.toml",
        ("run", file_of(tmp_path), "--ranks=2", "--out", str(tmp_path)): "exists already",
        ("run", "demo", "--ranks=2", "--device=cuda"): "no CUDA device can be used here",
        ("run", "demo", "--ranks=2", "--dry-run"): "leave --ranks out",
        ("run", "demo", "--ranks=2", "--federation=x"): "are for runs on this machine",
        ("resume", str(tmp_path / "gone"), "--ranks=2"): "there is no such folder",
    }.items():
        done = fedloom(*words)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert sentence in done.stderr
