"""How silos of a deployment are: what became of each in every round, as the server's journal says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from fedloom.reports.logs import finite

MARKS = {  # shapes tell them apart, not colours
    "answered": "●",
    "asked": "○",
    "late": "◐",
    "missing": "–",
    "refused": "◇",
    "rejected": "▲",
    "failed": "✕",
}
UNDER_WAY = "asked"


@dataclass(frozen=True)
class SiloHealth:
    """One silo: how each round ended for it, and what the newest trouble was."""

    silo: str
    rounds: Mapping[int, str]
    seconds: float | None  # until an answer, the median
    bytes_up: int
    trouble: str

    @property
    def answered(self) -> int:
        """Rounds in which its update was taken."""
        return sum(event == "answered" for event in self.rounds.values())


def health_of(rows: Iterable[Mapping[str, Any]]) -> tuple[SiloHealth, ...]:
    """Every silo that the journal names, in the order met; the last word about a round counts."""
    by_silo: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if isinstance(row.get("silo"), str) and row.get("event") in MARKS:
            by_silo.setdefault(row["silo"], []).append(row)
    return tuple(_silo(name, events) for name, events in by_silo.items())


def _silo(name: str, events: list[Mapping[str, Any]]) -> SiloHealth:
    rounds: dict[int, str] = {}
    for event in events:
        if event["event"] != UNDER_WAY or rounds.get(event["round"]) in (None, "missing"):
            rounds[event["round"]] = event["event"]
    answers = [event for event in events if event["event"] == "answered"]
    seconds = [value for event in answers if (value := finite(event.get("seconds"))) is not None]
    sizes = (finite(event.get("bytes")) for event in answers)
    troubles = [event for event in events if event["event"] not in ("answered", UNDER_WAY)]
    reason = ""
    if troubles:
        newest = troubles[-1]
        reason = f"round {newest['round']}, {newest['event']}" + (f": {newest['reason']}" if "reason" in newest else "")
    return SiloHealth(
        name,
        dict(sorted(rounds.items())),
        median(seconds) if seconds else None,
        sum(int(size) for size in sizes if size is not None and size >= 0),
        reason,
    )
