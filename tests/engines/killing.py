"""Runs that end by SIGKILL; at module level, because the process that dies imports them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from fedloom.config import Config
from fedloom.engines.base import Result, RoundReport
from fedloom.experiment import Observer, resume, train
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.sweep import Trial, read_sweep, run_sweep
from privacy import sqlite_faults

# Forked from a server that has imported everything (optimisers import dynamo) but never trained: quick to start.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["fedloom.experiment", "torch._dynamo"])


def die_at_write(number: int) -> None:
    """Let this process be killed just before its ``number``-th durable write takes effect."""
    writes, fsync = itertools.count(1), os.fsync

    def counted(descriptor: int) -> None:
        if next(writes) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync = counted


def _train(config: Config, out: Path, write: int) -> None:
    die_at_write(write)
    train(config, out)


def _resume(out: Path, write: int) -> None:
    die_at_write(write)
    resume(out)


def train_until_write(config: Config, out: Path, write: int) -> None:
    """Train in a process that is killed at one of its writes; 0 is none of them."""
    _let_die(processes.Process(target=_train, args=(config, out, write)))


def resume_until_write(out: Path, write: int) -> None:
    """Resume in a process that is killed at one of its writes."""
    _let_die(processes.Process(target=_resume, args=(out, write)))


class Endless(Observer):
    """Waits before the last round: however fast a run is, it can be killed."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def round_done(self, report: RoundReport, metrics: dict[str, float]) -> None:
        while report.context.round == self._rounds - 1:
            signal.pause()


def _train_endlessly(config: Config, out: Path) -> None:
    train(config, out, observer=Endless(config.rounds))


def train_until_killed(config: Config, out: Path, rounds: int, delay: float) -> None:
    """Train in a process that is killed from outside, some seconds after a number of rounds was logged."""
    process, log = processes.Process(target=_train_endlessly, args=(config, out)), out / "metrics.jsonl"
    process.start()
    while process.is_alive() and not (log.exists() and log.read_bytes().count(b"\n") >= rounds):
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the process ended before it could be killed"


class Dying(Observer):
    """Is killed when a round is done."""

    def round_done(self, report: RoundReport, metrics: dict[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _sweep(path: Path, out: Path, last: str) -> None:
    @contextmanager
    def observe(packed: Sequence[Trial]) -> Iterator[Observer]:
        yield Dying() if last in [trial.name for trial in packed] else Observer()

    run_sweep(read_sweep(path), out, observe)


def sweep_until_killed(path: Path, out: Path, last: str) -> None:
    """Sweep in a process that is killed after the first round of a trial."""
    _let_die(processes.Process(target=_sweep, args=(path, out, last)))


def _let_die(process: multiprocessing.process.BaseProcess) -> None:
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


class Witness(Observer):
    """Notes every release as it is made: round, silo and the bytes that left."""

    def __init__(self, seen: Path) -> None:
        self._seen = seen

    def silo_done(self, context: RoundContext, result: Result) -> None:
        found = sha256()
        for key, block in sorted(result.update.blocks.items()):
            for name, tensor in sorted(block.items()):
                found.update(f"{key}/{name}".encode() + tensor.contiguous().numpy().tobytes())
        with self._seen.open("a") as file:
            file.write(f"{context.round}/{result.update.silo}/{found.hexdigest()}\n")


def _live(config: Config, federation: Federation, out: Path, write: int) -> None:
    sqlite_faults.die_at_write(itertools.count(1), write)
    witness = Witness(out.with_name("seen"))
    if out.exists():
        resume(out, federation, witness)
    else:
        train(config, out, federation, witness)


def live_until_ledger_write(config: Config, federation: Federation, out: Path, write: int) -> bool:
    """Begin a run or go on with it, killed at a write of its ledger; whether it came to its end."""
    process = processes.Process(target=_live, args=(config, federation, out, write))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0
