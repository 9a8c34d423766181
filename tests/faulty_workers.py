"""What a worker of ``fedloom reproduce`` may do instead of its work; in a module that a new process can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from fedloom.reproduction import running
from fedloom.reproduction.running import NeededRun, Work

work_of_a_worker = running._work


def linger(*_: object) -> None:
    """Take longer than there is time."""
    time.sleep(20)


def die(*_: object) -> None:
    """Be killed, as for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(tasks: Sequence[NeededRun], work: Work, workers: int, report: Connection) -> None:
    """Go wrong in the middle."""
    running.train_pack = lambda *_: 1 / 0
    work_of_a_worker(tasks, work, workers, report)
