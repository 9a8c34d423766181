"""What heads and mixtures are worth, as ``fedloom downstream`` left it in a run folder that may be damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.reports.logs import finite

TESTS, NAMES = ("global", "silo"), ("accuracy", "balanced_accuracy", "macro_f1", "worst_group")


@dataclass(frozen=True)
class DownstreamFacts:
    """Scores by row and test; the mixture's lambdas, of all silos together."""

    rows: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    tests: Mapping[str, str] = field(default_factory=dict)
    lambdas: tuple[float, ...] = ()
    sentences: tuple[str, ...] = ()
    guarantee: str = ""  # of what heads and mixtures let out, which may be weaker than the run's


def read_downstream(path: Path) -> DownstreamFacts:
    """The facts in downstream.json; raises what reading a hostile JSON file may raise."""
    found = _mapping(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    rows = {
        name: {test: _scores(_mapping(row).get(test)) for test in TESTS}
        for name, row in _mapping(found.get("rows")).items()
    }
    if gain := _mapping(found.get("gain")):
        rows["mixture minus silo-only"] = {test: _scores(gain.get(test)) for test in TESTS}
    sentences = found.get("sentences")
    return DownstreamFacts(
        rows=rows,
        tests={name: str(meaning) for name, meaning in _mapping(found.get("tests")).items()},
        lambdas=tuple(_lambdas(found.get("silos"))),
        sentences=tuple(map(str, sentences)) if isinstance(sentences, list) else (),
        guarantee=str(found.get("guarantee", "")),
    )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _scores(value: Any) -> dict[str, float]:
    known = {name: finite(_mapping(value).get(name)) for name in NAMES}
    return {name: score for name, score in known.items() if score is not None}


def _lambdas(silos: Any) -> list[float]:
    found = []
    for silo in silos if isinstance(silos, list) else []:
        weights = _mapping(_mapping(silo).get("lambda")).get("mixture")
        values = [finite(weight) for weight in (weights if isinstance(weights, list) else [weights])]
        found += [value for value in values if value is not None]
    return found
