"""A run on one screen: what it is, how far, what it promises, how good, and what it makes."""

from __future__ import annotations

from collections.abc import Mapping

from fedloom.evaluation.metric import count_of, metric_title
from fedloom.runs.folder import RunFolder
from fedloom.runs.guarantee import guarantee_of
from fedloom.runs.metrics import of_whom
from fedloom.shown import Shown

MOST_PICTURES = 4


def shown_run(folder: RunFolder) -> Shown:
    """Method, state, guarantee, newest metrics and newest samples."""
    config, metrics = folder.config, folder.latest_metrics()
    lines = [
        f"{config.method.name} is {folder.status['state']}, {folder.rounds_done} of {config.rounds} rounds done",
        guarantee_of(folder).line,
    ]
    table = shown_metrics(metrics)
    samples = sorted((folder.path / "samples").glob("round-*"))
    files = sorted(samples[-1].glob("*.png"))[:MOST_PICTURES] if samples else []
    pictures = [(file.stem, file.read_bytes()) for file in files]
    return Shown(str(folder.path), lines, table.headers, table.rows, pictures)


def shown_metrics(metrics: Mapping[str, float]) -> Shown:
    """One row for each metric, in words."""
    rows = [(metric_title(key), of_whom(key), count_of(key), f"{value:.4g}") for key, value in sorted(metrics.items())]
    return Shown("metrics" if rows else "no metrics yet", (), ("metric", "of", "from", "value"), rows)
