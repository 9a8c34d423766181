"""Reading logs that may be damaged: the history of every number by its key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedloom.runs.files import read_lines

UNREADABLE = (OSError, ValueError, RecursionError)  # what reading a hostile JSON file may raise
History = dict[str, dict[int, float | None]]  # metric key -> round -> value, None where it is not finite


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a log that name their round; raises one of ``UNREADABLE`` where the file cannot be read at all."""
    rows = [row for row in read_lines(path) if isinstance(row, dict)]
    return [row for row in rows if type(row.get("round")) is int and 0 <= row["round"] < 10**9]


def finite(value: Any) -> float | None:
    """A number as a finite float; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # a whole number beyond all floats
        return None
    return found if math.isfinite(found) else None


def histories(rows: Iterable[Mapping[str, Any]]) -> History:
    """Every number of the rows by key and round; a later row wins."""
    found: History = {}
    for row in rows:
        for key, value in row.items():
            if key != "round" and isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(key, {})[row["round"]] = finite(value)
    return {key: dict(sorted(values.items())) for key, values in found.items()}


def last(history: Mapping[int, float | None]) -> float | None:
    """The newest value."""
    return history[max(history)] if history else None
