"""How a run goes on: live in a terminal, one line a round anywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedloom.cli.metrics import listed, number
from fedloom.cli.output import clock, plural
from fedloom.engines.base import Engine, Result, RoundReport
from fedloom.experiment import Experiment, Observer
from fedloom.federation.rounds import RoundContext

BAR_WIDTH = 20


class RoundProgress(Observer):
    """Round, silos done, speed, time left and loss terms; a line is kept for every round with metrics.

    Where there is no terminal, such as in a log, each round is a line of text as soon as it is over.

    Of several ``runs`` in one program it shows the silos of all, and keeps no lines: they would not say whose they are.
    """

    def __init__(self, console: Console, runs: int = 1) -> None:
        self._runs = runs
        # Refreshed by events alone: a refreshing thread would take time from training and blur kept lines.
        self._live = Live(Text("preparing", style="dim"), console=console, transient=True, auto_refresh=False)
        self._rounds = self._rounds_done = self._rounds_before = 0
        self._silos = ""
        self._speed = ""
        self._terms: Mapping[str, float] = {}
        self._steps = 0
        self._start = self._round_start = 0.0

    def __enter__(self) -> RoundProgress:
        if self._live.console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def started(self, experiment: Experiment, engine: Engine, rounds_done: int) -> None:
        """Say what runs, and where."""
        federation = experiment.federation
        self._keep(f"{experiment.method.name} on {federation.name}, {plural(len(federation), 'silo')}")
        self._keep(f"groups: {', '.join(federation.groups)}; engine: {engine.describe()}")
        self._rounds, self._rounds_done, self._rounds_before = experiment.config.rounds, rounds_done, rounds_done
        self._start = self._round_start = time.perf_counter()
        self._refresh()

    def silo_done(self, context: RoundContext, result: Result) -> None:
        """Move the counter of the round."""
        self._steps += result.steps
        seconds = time.perf_counter() - self._round_start
        self._speed = f"{self._steps / seconds:.0f} steps/s"
        silos_done = 1 + int(self._silos.partition("/")[0] or 0)
        self._silos = f"{silos_done}/{len(context.participants)}" if self._runs == 1 else str(silos_done)
        self._refresh()

    def round_done(self, report: RoundReport, metrics: dict[str, float]) -> None:
        """Move on to the next round."""
        self._rounds_done, self._terms = report.context.round, report.terms
        self._steps, self._silos, self._round_start = 0, "", time.perf_counter()
        if self._runs == 1:
            found = _by_metric(metrics)
            if not self._live.is_started:
                self._keep("  ".join(filter(None, (self._count(), listed(self._terms), found, self._time_left()))))
            elif metrics:
                self._keep(f"round {self._rounds_done}  {found}")
        self._refresh()

    def _keep(self, line: str) -> None:
        if self._live.is_started:
            self._live.console.print(line, markup=False)
        elif self._runs == 1:
            print(line, file=self._live.console.file, flush=True)

    def _count(self) -> str:
        return f"round {self._rounds_done}/{self._rounds}"

    def _refresh(self) -> None:
        if self._live.is_started:
            self._live.update(self._view(), refresh=True)

    def _view(self) -> RenderableType:
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._rounds, completed=self._rounds_done, width=BAR_WIDTH)
        under_way = min(self._rounds_done + 1, self._rounds)
        silos = f"silos {self._silos or '0'}"
        line.add_row(f"round {under_way}/{self._rounds}", bar, silos, self._speed, self._time_left())
        return Group(line, Text(listed(self._terms), style="dim"))

    def _time_left(self) -> str:
        here = self._rounds_done - self._rounds_before
        if not here:
            return ""
        per_round = (self._round_start - self._start) / here
        return f"{clock(per_round * (self._rounds - self._rounds_done))} left"


def _by_metric(metrics: Mapping[str, float]) -> str:
    """Short: each metric's first name with the values of its first variant, group after group."""
    values: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    for key, value in metrics.items():
        metric, variant, *_ = key.split("/")
        if shown.setdefault(metric, variant) == variant and "/group=" in key:
            values.setdefault(metric, []).append(number(value))
    return "  ".join(f"{metric} {' / '.join(found)}" for metric, found in values.items())
