"""Write what benchmarks/align_fl.py measured into the tables of the page beside this file.

    python papers/align-fl/fill.py

A line of a table that has a cell ``fedloom run align-fl/...`` is that run's; columns that are called as in COLUMNS are
filled with the mean over its seeds and, where there are several, their sample standard deviation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

PAGE = Path(__file__).with_name("README.md")
RESULTS = Path(__file__).parents[2] / "benchmarks/results/align_fl-cuda.json"
COMMAND = re.compile(r"`fedloom run align-fl/([^`]+)`")
MISSING = "-"

Found = dict[str, Any]  # what was found of one run


def metric(start: str, scale: float = 1.0) -> Callable[[Sequence[Found]], str]:
    """A metric by the beginning of its key."""

    def cell(runs: Sequence[Found]) -> str:
        values = [scale * v for run in runs for k, v in run["metrics"].items() if k.startswith(start) and "=" not in k]
        return spread(values, 2)

    return cell


def exposed(kind: str) -> Callable[[Sequence[Found]], str]:
    """How often records of a kind are recognisable in what leaves the first silo, or, if averaged, everybody, in %."""

    def cell(runs: Sequence[Found]) -> str:
        audits = [[a for a in run.get("outliers", ()) if a["way"] == "reconstructed"] for run in runs]
        return spread([100 * found[-1][kind]["value"] for found in audits if found], 1)

    return cell


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and deviation, as far as there are any."""
    if not values:
        return MISSING
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{deviation}"


COLUMNS: dict[str, Callable[[Sequence[Found]], str]] = {
    "distance, 2,000 samples": metric("frechet/paper-"),
    "distance, 10,000": metric("frechet/efficientnet"),
    "accuracy, paper's protocol": metric("probe/paper-accuracy", 100),
    "F1, paper's protocol": metric("probe/paper-weighted", 100),
    "accuracy, sound": metric("probe/accuracy", 100),
    "outliers trained on": exposed("outliers"),
    "outliers never seen": exposed("unseen_outliers"),
    "typical records": exposed("typical"),
    "seeds": lambda runs: str(len(runs)) if runs else MISSING,
}


def filled(page: str, rows: Sequence[Found]) -> str:
    """The page with these results in its tables."""
    titles: list[str] = []
    lines = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not titles:
            titles = cells
        elif not cells:
            titles = []
        elif (command := COMMAND.search(line)) and len(cells) == len(titles):
            runs = [row for row in rows if row["row"] == command[1]]
            known = [COLUMNS[t](runs) if t in COLUMNS else c for t, c in zip(titles, cells, strict=True)]
            line = f"| {' | '.join(known)} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
