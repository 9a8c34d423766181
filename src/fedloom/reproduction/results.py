"""Result files: one JSON for each run, with all that a reader needs to judge it and to repeat it, and no date."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fedloom.errors import RunFolderError
from fedloom.runs.files import explained, write_atomically


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run: which, how it ended, and what was measured of it."""

    row: str  # the table and the row that asked for it first
    preset: str
    overrides: list[str]
    config: str  # the identity of its settings, equal for all seeds
    seed: int
    state: str  # "finished" or "diverged"
    reason: str
    rounds: int
    measured: list[str]  # names of metrics
    metrics: dict[str, float]
    seconds: dict[str, float]
    device: str
    engine: str
    versions: dict[str, str]

    def write(self, path: Path) -> None:
        """The whole file at once."""
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(asdict(self), indent=1) + "\n").encode())


@dataclass(frozen=True)
class Results:
    """All results of a paper, whichever table asked for them."""

    found: tuple[Result, ...]

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Every result file in a paper's folder."""
        return cls(tuple(_read(path) for path in sorted(folder.rglob("*.json"))))

    def of(self, config: str) -> list[Result]:
        """The repetitions of a run, by seed."""
        return sorted((result for result in self.found if result.config == config), key=lambda result: result.seed)

    def holds(self, config: str, seed: int, measured: set[str]) -> bool:
        """Whether a run is known in all that is asked of it."""
        return any(result.seed == seed and measured <= set(result.measured) for result in self.of(config))


def result_path(paper: Path, table: str, row: str, seed: int) -> Path:
    """Where a run's result lies in the paper's folder."""
    return paper / "results" / table.partition("/")[2] / f"{row.replace('/', '-')}-seed-{seed}.json"


def _read(path: Path) -> Result:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Result(**{field.name: found[field.name] for field in fields(Result)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} is not a result file of this version: {error!r}") from error
