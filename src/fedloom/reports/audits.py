"""What attacks found, as ``fedloom audit`` left it in a run folder that may be damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.reports.logs import finite

KINDS = ("outliers", "unseen_outliers", "typical", "unseen_typical")

Row = tuple[str, ...]


@dataclass(frozen=True)
class AuditFacts:
    """Sentences, and two tables in words: who was attacked how, and how well that went."""

    refuted: bool = False
    sentences: tuple[str, ...] = ()
    membership: tuple[Row, ...] = ()  # generator, attack, area, true positive rate at each false positive rate
    outliers: tuple[Row, ...] = ()  # generator, way, rate of each kind


def read_audit(path: Path) -> AuditFacts:
    """The facts in audit.json; raises what reading a hostile JSON file may raise."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(found, dict):
        return AuditFacts()
    sentences, attacks = found.get("sentences"), found.get("attacks")
    attacks = attacks if isinstance(attacks, dict) else {}
    return AuditFacts(
        refuted=found.get("refuted") is True,
        sentences=tuple(map(str, sentences)) if isinstance(sentences, list) else (),
        membership=tuple(
            (str(row.get("target")), str(row.get("attack")), _number(row.get("area")), *_rates(row))
            for row in _rows(attacks.get("membership"))
        ),
        outliers=tuple(
            (str(row.get("target")), str(row.get("way")), *(_share(row.get(kind)) for kind in KINDS))
            for row in _rows(attacks.get("outliers"))
        ),
    )


def best_area(audit: Any) -> float | None:
    """Of all attacks on membership in a run's audit; None where there are none."""
    attacks = audit.get("attacks") if isinstance(audit, dict) else None
    rows = _rows(attacks.get("membership") if isinstance(attacks, dict) else None)
    known = [area for row in rows if (area := finite(row.get("area"))) is not None]
    return max(known, default=None)


def _rows(value: Any) -> Iterator[dict[str, Any]]:
    yield from (row for row in (value if isinstance(value, list) else []) if isinstance(row, dict))


def _rates(row: dict[str, Any]) -> Row:
    rates = row.get("true_positive_rates")
    shares = tuple(map(_share, rates.values())) if isinstance(rates, dict) else ()
    return (*shares, "-", "-")[:2]


def _share(value: Any) -> str:
    """A rate with its interval."""
    parts = [finite(value.get(key)) for key in ("value", "low", "high")] if isinstance(value, dict) else [None]
    known = [part for part in parts if part is not None]
    return "{:.1%} ({:.1%} to {:.1%})".format(*known) if len(known) == 3 else "-"


def _number(value: Any) -> str:
    return "-" if (known := finite(value)) is None else f"{known:.3f}"
