"""Processes that live as long as a command: started together, started again when they die, stopped by number."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fedloom.errors import FedloomError

STOPPING = 15.0  # seconds that a process has to end by itself
# Seconds until a process that has just been started again, and died again, is started once more; doubled each time.
SOONEST, LATEST = 1.0, 30.0
YOUNG = 60.0  # seconds after which it counts as one that lives


def locked(path: Path, taken: str) -> IO[str]:
    """A file that one process at a time can have; it is free again when it is closed, or its holder dies."""
    lock = path.open("w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise FedloomError(taken) from error
    return lock


def is_locked(path: Path) -> bool:
    """Whether a process has such a file now."""
    if not path.is_file():
        return False
    try:
        locked(path, "").close()
    except FedloomError:
        return True
    return False


# Below those that systems give to outgoing connections, and each once: one stays free until somebody listens there.
_PORTS = iter(random.SystemRandom().sample(range(20_000, 32_000), 1_000))


def free_port() -> int:
    """A port of the loopback interface that nobody uses."""
    for port in _PORTS:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise FedloomError("no port of the loopback interface is free")


def troubles(log: str) -> list[str]:
    """What a process of ours warned of, without times and levels."""
    found = (re.match(r"\S+ \S+ (?:WARNING|ERROR) (.*)", line) for line in log.splitlines())
    return [match[1] for match in found if match]


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import what stays: nobody looks for garbage among it, which would take a fifth of the time, now or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


@dataclass
class Child:
    """A command that is kept running; what it says goes to a file."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    holds: tuple[int, ...] = ()  # open files that it keeps open, too
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    pause: float = 0.0  # before the next start, should it die young
    again: float = 0.0  # when it is started again, if it is dead
    heard: int = 0  # bytes of its log that were looked at

    def start(self) -> None:
        """Run it, in a session of its own: a Ctrl-C is for the command that keeps it."""
        with self.log.open("ab") as log:
            self.heard = log.tell()
            self.process = subprocess.Popen(
                list(self.command),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
                pass_fds=self.holds,
            )
        self.started, self.again = time.monotonic(), 0.0

    def tend(self) -> bool:
        """Whether it has just died; then it is started again at the next call, after a pause if it dies once more."""
        now = time.monotonic()
        if self.process is None or self.process.poll() is None:
            return False
        if not self.again:
            pause = self.pause if now - self.started < YOUNG else 0.0
            self.again, self.pause = now + pause, min(LATEST, max(SOONEST, 2 * pause))
            return True
        if now > self.again:
            self.start()
        return False

    def news(self) -> str:
        """The whole lines that it has written into its log since the last look."""
        with self.log.open("rb") as log:
            log.seek(self.heard)
            lines, end, _ = log.read().rpartition(b"\n")
        self.heard += len(lines + end)
        return lines.decode(errors="replace")

    def signal(self, number: int) -> None:
        """To it and all that it started, as long as anybody of them is left."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def last_words(self, lines: int = 1) -> str:
        """The end of its log."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""
        return "\n".join(text.strip().splitlines()[-lines:])


@dataclass
class Household:
    """The children of a command."""

    children: list[Child] = field(default_factory=list)

    def add(self, child: Child) -> Child:
        """Start one and keep it running."""
        self.children.append(child)
        child.start()
        return child

    def tend(self) -> list[Child]:
        """Those that have just died; all the dead are started again, each after a pause."""
        return [child for child in self.children if child.tend()]

    def stop(self) -> None:
        """All of them, the youngest first."""
        for child in reversed(self.children):
            child.signal(signal.SIGTERM)
        end = time.monotonic() + STOPPING
        for child in reversed(self.children):
            if child.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.1, end - time.monotonic()))
            child.signal(signal.SIGKILL)
