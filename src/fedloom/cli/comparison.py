"""``fedloom compare``: the last metrics of several runs, side by side; seeds of one experiment together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fedloom.cli.metrics import WORDS, by_metric, in_words, number, say_verdict
from fedloom.cli.output import Json, say, show, show_json, table
from fedloom.errors import RunFolderError
from fedloom.evaluation.metric import best
from fedloom.runs.metrics import split_key

if TYPE_CHECKING:
    from fedloom.runs.cohorts import Cohort, Summary
    from fedloom.runs.folder import RunFolder

IN_DOMAIN = "domain-hit/domain-cnn/"
SIDE_BY_SIDE = 3  # more runs than these stand one below the other, so that the tables stay narrow
ABSENT = "-"


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Compare runs by their last metrics, the better value emphasised.

    Runs that differ in nothing but the seed share a column, with mean and standard deviation.
    """
    from fedloom.runs.folder import RunFolder

    runs = [RunFolder.open(folder) for folder in folders]
    if as_json:
        show_json(compared(runs))
    else:
        show_comparison(runs)


def compared(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """The comparison as plain values."""
    from fedloom.reports.verdict import verdict_of
    from fedloom.runs.cohorts import cohorts

    metrics = {str(run.path): run.latest_metrics() for run in _measured(runs)}
    found = cohorts(runs)
    return {
        "verdicts": {str(run.path): asdict(verdict_of(run)) for run in runs},
        "runs": metrics,
        "mean_domain_hit": {name: mean(hits) for name, values in metrics.items() if (hits := _hits(values))},
        "cohorts": [
            {
                "runs": [str(run.path) for run in cohort.runs],
                "seeds": list(cohort.seeds),
                "metrics": {key: asdict(summary) for key, summary in cohort.metrics().items()},
            }
            for cohort in found
        ],
        "unfinished": {str(run.path): run.status for run in runs if run.status["state"] != "finished"},
    }


def show_comparison(runs: Sequence[RunFolder]) -> None:
    """The comparison as a table, with a line about each run that did not finish."""
    from fedloom.runs.cohorts import cohorts

    columns = cohorts(_measured(runs))
    summaries = [cohort.metrics() for cohort in columns]
    names = _names(columns)
    keys = by_metric(key for summary in summaries for key in summary)
    cells = {key: _cells(key, [summary.get(key) for summary in summaries]) for key in keys}
    for rows in _side_by_side(names, cells) if len(names) <= SIDE_BY_SIDE else _one_below_the_other(names, cells):
        show(rows)
        show("")
    for run in runs:
        say_verdict(run, run.path.name if len({other.path.name for other in runs}) == len(runs) else str(run.path))
    for run in runs:
        if run.status["state"] != "finished":
            say(f"{run.path} {_state(run.status)}")


def _side_by_side(names: Sequence[str], cells: dict[str, list[Text]]) -> Iterator[Table]:
    """One table: a row for each metric and group, a column for each run."""
    rows = table(*WORDS, *names, right=tuple(names))
    for key, values in cells.items():
        rows.add_row(*in_words(key), *values)
    yield rows


def _one_below_the_other(names: Sequence[str], cells: dict[str, list[Text]]) -> Iterator[Table]:
    """A table for each metric: a row for each run that has it, a column for each group."""
    for metric in dict.fromkeys(split_key(key)[0] for key in cells):
        groups = {split_key(key)[1] or "all": values for key, values in cells.items() if split_key(key)[0] == metric}
        title, _, count = in_words(metric)
        rows = table(f"{title}, {count}" if count else title, *groups, right=tuple(groups))
        for name, values in zip(names, zip(*groups.values(), strict=True), strict=True):
            if any(value.plain != ABSENT for value in values):
                rows.add_row(name, *values)
        yield rows


def _measured(runs: Sequence[RunFolder]) -> Sequence[RunFolder]:
    if not any(run.latest_metrics() for run in runs):
        raise RunFolderError(f"nothing to compare: no metrics yet in {', '.join(str(run.path) for run in runs)}")
    return runs


def _state(status: dict[str, Any]) -> str:
    if status["state"] == "diverged":
        return f"diverged in round {status['round']}: {status['reason']}"
    return f"is {status['state']}, {status['round']} rounds done"


def _hits(metrics: dict[str, float]) -> list[float]:
    return [value for key, value in metrics.items() if key.startswith(IN_DOMAIN) and split_key(key)[1]]


def _names(columns: Sequence[Cohort]) -> list[str]:
    """The first folder of each column, without its parent where all have the same; repetitions without their seed."""
    paths = [cohort.runs[0].path for cohort in columns]
    beside = len({path.parent for path in paths}) == 1
    names = [path.name if beside and path.name else str(path) for path in paths]
    return [
        name if len(cohort.runs) == 1 else f"{_without_seed(name, cohort.seeds[0])} ({len(cohort.runs)} seeds)"
        for name, cohort in zip(names, columns, strict=True)
    ]


def _without_seed(name: str, seed: int) -> str:
    """What a run is called apart from its seed.

    >>> _without_seed("fedvae-seed-12", 12), _without_seed("demo-fedvae-s1", 1)
    ('fedvae', 'demo-fedvae')
    """
    return re.sub(rf"[-_]?(seed|s)?[-_]?{seed}$", "", name) or name


def _cells(key: str, summaries: Sequence[Summary | None]) -> list[Text]:
    winner = best(key, [summary.mean if summary else None for summary in summaries])
    return [
        Text(_cell(summary), style="bold green" if summary and summary.mean == winner else "") for summary in summaries
    ]


def _cell(summary: Summary | None) -> str:
    if summary is None:
        return ABSENT
    if summary.deviation is None:
        return number(summary.mean)
    return f"{number(summary.mean)} ± {summary.deviation:.2g}"
