"""Commands that run until they are stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedloom.cli.output import say

TICK = 0.5  # seconds between two looks at what runs


def tend_until_stopped(tend: Callable[[], None], beat: Callable[[], None]) -> None:
    """Look after what runs every few seconds, and show that somebody does."""
    try:
        while True:
            tend()
            beat()
            time.sleep(TICK)
    except KeyboardInterrupt:
        say("stopping")


@contextmanager
def stop_signals() -> Iterator[None]:
    """A service manager's signal stops in the same order as Ctrl-C, from before the first process is started."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # stopping is not to be stopped half-way
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
