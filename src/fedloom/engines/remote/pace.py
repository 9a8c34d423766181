"""When a silo's answer leaves: time tells whoever waits how long the work took, and records have a say in that."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Pacemaker:
    """Lets work end only at whole multiples of a pace."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @contextmanager
    def kept(self, start: float, pace: float) -> Iterator[None]:
        """Whether the work succeeds or fails, wait for the next multiple of ``pace`` seconds after ``start``; 0: never.

        That rounds what time says up to the pace. It does not hide it: more work may still take a multiple more.
        """
        try:
            yield
        finally:
            if pace:
                passed = self.clock() - start
                self.sleep(math.ceil(passed / pace) * pace - passed)
