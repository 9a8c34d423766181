"""Whether a run has diverged, read from its log alone, so that a resumed run judges as the uninterrupted one."""

from __future__ import annotations

import math
from typing import Any

EXPLODED = 1000.0  # times the smallest loss so far (or 1, whichever is larger)
COLLAPSED = 0.05  # share of the real images' spread below which samples are all alike
PATIENCE = 10  # rounds within which samples need not have become diverse


def ailment(rows: list[dict[str, Any]], rounds: int) -> str | None:
    """Why the newest round of a log means that training has diverged; None while it is well.

    Samples that were never diverse may still become so: they count as collapsed only after better ones, or at the end
    of a run that was not too short to tell.
    """
    newest, earlier = rows[-1], rows[:-1]
    for key, value in newest.items():
        if isinstance(value, float) and not math.isfinite(value) and key.startswith(("train/", "spread/")):
            return f"{key} is not finite"
        if key.startswith("train/") and key.endswith("/loss"):
            smallest = min((abs(row[key]) for row in earlier if key in row), default=math.inf)
            if value > EXPLODED * max(1.0, smallest):
                return f"{key} exploded to {value:.3g}"
        if key.startswith("spread/") and value < COLLAPSED:
            was_diverse = any(row.get(key, 0.0) >= COLLAPSED for row in earlier)
            if was_diverse or newest["round"] == rounds >= PATIENCE:
                return f"samples collapsed: {key} = {value:.3g}"
    return None
