"""How a run goes on in a notebook: one line that changes, below the cell."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

from fedloom.engines.base import Engine, RoundReport
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.run_loop import Observer
from fedloom.shown import Shown

TERMS = 3  # of the loss, on the line


class InlineProgress(Observer):
    """Round, loss and time left; at most some changes a second, so that a notebook stays small."""

    def __init__(self, seconds: float = 0.5) -> None:
        self._seconds, self._rounds, self._before = seconds, 0, 0
        self._start = self._last = 0.0
        self._handle: Any = None
        self._title = ""

    def started(self, experiment: Experiment, engine: Engine, rounds_done: int) -> None:
        """Show what runs, and where."""
        self._rounds, self._before, self._start = experiment.config.rounds, rounds_done, time.perf_counter()
        self._title = f"{experiment.method.name} on {experiment.federation.name}, {engine.describe()}"
        self._handle = importlib.import_module("IPython.display").display(Shown(self._title), display_id=True)

    def round_done(self, report: RoundReport, metrics: dict[str, float]) -> None:
        """Change the line, where it is time to."""
        now, done = time.perf_counter(), report.context.round
        if self._handle is None or (now - self._last < self._seconds and done < self._rounds):
            return
        self._last = now
        left = (now - self._start) / (done - self._before) * (self._rounds - done)
        numbers = list(({**report.terms, **metrics}).items())[:TERMS]
        said = ", ".join(f"{name.rpartition('/')[2]} {value:.4g}" for name, value in numbers)
        self._handle.update(Shown(self._title, [f"round {done} of {self._rounds}: {said}; {left:.0f} s left"]))


def usual_observer() -> Observer:
    """In a notebook one that shows how a run goes on, elsewhere one that is silent."""
    return InlineProgress() if "ipykernel" in sys.modules else Observer()
