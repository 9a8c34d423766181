"""``fedloom compare``: the last metrics of several runs, side by side."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from rich.text import Text

from fedloom.cli.metrics import by_metric, last_metrics, number
from fedloom.cli.output import Json, show, show_json, table
from fedloom.errors import RunFolderError
from fedloom.runs.metrics import split_key

# Which way is better; a metric that is not named here is shown without a winner.
HIGHER = {"domain-hit", "precision", "recall", "density", "coverage", "inception-score", "probe", "utility"}
LOWER = {"blend", "frechet", "kernel"}
IN_DOMAIN = "domain-hit"


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Compare runs: a row for each metric and group, a column for each run, the better value emphasised."""
    from fedloom.experiment import load

    runs = {str(folder): last_metrics(load(folder)) for folder in folders}
    if not any(runs.values()):
        raise RunFolderError(f"nothing to compare: no metrics yet in {', '.join(runs)}")
    in_domain = {name: mean(hits) for name, metrics in runs.items() if (hits := _hits(metrics))}
    if as_json:
        show_json({"runs": runs, "mean_domain_hit": in_domain})
        return
    names = _short_names(list(runs))
    rows = table("metric", "group", *names.values(), right=tuple(names.values()))
    for key in by_metric(key for metrics in runs.values() for key in metrics):
        values = [metrics.get(key) for metrics in runs.values()]
        rows.add_row(*split_key(key), *_cells(key, values))
    show(rows)
    if in_domain:
        found = ", ".join(f"{share:.1%} in {names[name]}" for name, share in in_domain.items())
        show(f"\nSamples that look like their own group, mean over groups: {found}.")


def _hits(metrics: dict[str, float]) -> list[float]:
    return [value for key, value in metrics.items() if key.partition("/")[0] == IN_DOMAIN]


def _short_names(folders: list[str]) -> dict[str, str]:
    """Folders without what they have in common."""
    parents = [str(Path(folder).parent) for folder in folders]
    if len(set(parents)) == 1:
        return {folder: Path(folder).name or folder for folder in folders}
    return {folder: folder for folder in folders}


def _cells(key: str, values: list[float | None]) -> list[Text]:
    metric, known = key.partition("/")[0], [value for value in values if value is not None]
    best = max(known) if metric in HIGHER else min(known) if metric in LOWER else None
    emphasise = best is not None and len(set(known)) > 1
    return [
        Text("-") if value is None else Text(number(value), style="bold green" if emphasise and value == best else "")
        for value in values
    ]
