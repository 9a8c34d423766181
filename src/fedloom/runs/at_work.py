"""Which process is at work on a run: one at a time, known by a lock that ends with it, however it ends."""

from __future__ import annotations

import importlib
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fedloom.errors import RunFolderError

FILE = "at-work"
TRIES, PAUSE = 5, 0.05  # whoever only looks holds the lock for a moment


@dataclass(frozen=True)
class AtWork:
    """A process, and the machine that it is on."""

    process: int
    machine: str

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine."""
        return self.machine == platform.node()


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Hold a run's folder while this process changes it; refused while another one does."""
    path = folder / FILE
    for _ in range(TRIES):
        held = path.open("a+", encoding="utf-8")
        if _lock(held) and _is_at(held, path):
            break
        held.close()
        time.sleep(PAUSE)
    else:
        raise _refusal(folder, worker_of(folder))
    try:
        held.truncate(0)
        held.write(f"{os.getpid()} {platform.node()}")
        held.flush()
        yield
        path.unlink(missing_ok=True)
    finally:  # where it was interrupted, a file without a lock says that nobody is at work
        held.close()


def is_abandoned(folder: Path) -> bool:
    """Whether the last process that was at work on a run was stopped, or killed."""
    return (folder / FILE).is_file() and worker_of(folder) is None


def check_idle(folder: Path) -> None:
    """Refuse to touch a run that a process is at work on."""
    if (found := worker_of(folder)) is not None:
        raise _refusal(folder, found)


def worker_of(folder: Path) -> AtWork | None:
    """Who is at work on a run; nobody where a file was left by a process that was killed."""
    with suppress(OSError), (folder / FILE).open(encoding="utf-8") as opened:
        if not _lock(opened):
            process, _, machine = opened.read().partition(" ")
            return AtWork(int(process), machine) if process.isdecimal() else None
    return None


def _refusal(folder: Path, found: AtWork | None) -> RunFolderError:
    who = f"process {found.process} on {found.machine}" if found else "another process"
    return RunFolderError(f"{who} is at work on {folder}; 'fedloom stop {folder}' ends it, and nothing is lost")


def _lock(opened: IO[str]) -> bool:
    """Take a file's lock; a system or a file system without locks has nobody else to fear."""
    try:
        fcntl = importlib.import_module("fcntl")
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def _is_at(opened: IO[str], path: Path) -> bool:
    """Whether a file still has its name: its last holder may have taken it away in between."""
    try:
        return os.fstat(opened.fileno()).st_ino == path.stat().st_ino
    except OSError:
        return False
