"""Metrics as the commands show them: the last ones of a run, by metric and by whom they are of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from fedloom.cli.output import say, table
from fedloom.evaluation.metric import count_of, metric_title
from fedloom.runs.metrics import TRAINING, of_whom, split_key

if TYPE_CHECKING:
    from fedloom.experiment import Run
    from fedloom.runs.folder import RunFolder

TONES = {"green": typer.colors.GREEN, "amber": typer.colors.YELLOW, "red": typer.colors.RED}
WORDS = ("metric", "of", "from")  # the columns that stand for a key


def last_metrics(run: Run) -> dict[str, float]:
    """The newest metrics, of the run itself and of later evaluations; empty before the first."""
    return run.folder.latest_metrics()


def last_terms(run: Run) -> dict[str, float]:
    """The loss terms of the newest round in which anybody took part."""
    found = (_terms(row) for row in reversed(run.metrics()))
    return next((terms for terms in found if terms), {})


def _terms(row: Mapping[str, Any]) -> dict[str, float]:
    return {name.removeprefix(TRAINING): value for name, value in row.items() if name.startswith(TRAINING)}


def by_metric(keys: Iterable[str]) -> list[str]:
    """Each key once, metric by metric; groups stay in their own order."""
    return sorted(dict.fromkeys(keys), key=lambda key: split_key(key)[0])


def in_words(key: str) -> tuple[str, str, str]:
    """What a key says to people: what, of whom, from how many; ``--json`` shows keys themselves."""
    return metric_title(key), of_whom(key), count_of(key)


def number(value: float) -> str:
    """A number with four significant digits."""
    return f"{value:.4g}"


def listed(terms: Mapping[str, float]) -> str:
    """Loss terms on a line; the name of the phase is left out where there is but one."""
    phases = {name.rpartition("/")[0] for name in terms}
    prefix = f"{phases.pop()}/" if len(phases) == 1 else ""
    return "  ".join(f"{name.removeprefix(prefix)} {number(value)}" for name, value in terms.items())


def metrics_table(metrics: Mapping[str, float]) -> Table:
    """One row for each metric."""
    found = table(*WORDS, "value", right=("value",))
    for key in by_metric(metrics):
        found.add_row(*in_words(key), number(metrics[key]))
    return found


def say_verdict(folder: RunFolder, name: str = "") -> None:
    """What to think of a run, in one sentence; ``name`` goes before it."""
    from fedloom.reports.verdict import verdict_of

    found = verdict_of(folder)
    lead, colon, rest = found.sentence.partition(":")
    say(f"{f'{name}: ' if name else ''}{typer.style(lead + colon, fg=TONES[found.tone], bold=True)}{rest}")
