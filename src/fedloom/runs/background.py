"""Runs as processes of their own: begun without a terminal, and ended as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedloom.errors import FedloomError
from fedloom.runs.at_work import check_idle, worker_of

LOG = "output.log"  # in the run folder
PATIENCE = 60.0  # seconds that a run has to stop; it stops between two steps
PAUSE = 0.05


@dataclass(frozen=True)
class Begun:
    """A command in the background; one that was over before it was at work has an exit code."""

    process: int
    log: Path
    exit_code: int | None
    said: str


@dataclass(frozen=True)
class Performed:
    """A command that is over."""

    exit_code: int
    said: str


def perform(words: Sequence[str]) -> Performed:
    """Do a command in a process of its own, and wait for its end."""
    command = [sys.executable, "-m", "fedloom", *words]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return Performed(done.returncode, done.stdout.decode("utf-8", errors="replace"))


def begin(words: Sequence[str], folder: Path) -> Begun:
    """Start a command on a run folder, and wait until it is at work there, or over."""
    if before := (folder / "run.toml").is_file():
        check_idle(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder / LOG if before else folder.parent / f".{folder.name}-{os.getpid()}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedloom", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while process.poll() is None and worker_of(folder) is None:
        time.sleep(PAUSE)
    said = log.read_text(encoding="utf-8", errors="replace")
    if not before and (folder / "run.toml").is_file():
        log = log.replace(folder / LOG)
    elif not before and process.poll() is not None:
        log.unlink()
    return Begun(process.pid, log, process.poll(), said)


def stop(folder: Path) -> bool:
    """End the process that is at work on a run, and wait for it; whether there was one."""
    worker = worker_of(folder)
    if worker is None:
        return False
    if not worker.is_here:
        raise FedloomError(f"process {worker.process} is at work on {folder}, but on {worker.machine}; stop it there")
    os.kill(worker.process, signal.SIGTERM)
    until = time.monotonic() + PATIENCE
    while worker_of(folder) == worker:
        if time.monotonic() > until:
            raise FedloomError(f"process {worker.process} was told to stop and is still at its last step; try later")
        time.sleep(PAUSE)
    return True
