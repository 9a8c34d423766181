"""Result files: one JSON for each run, with all that a reader needs to judge it and to repeat it, and no date."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fedloom.config import EvaluationConfig
from fedloom.errors import RunFolderError
from fedloom.runs.files import explained, write_atomically


@dataclass(frozen=True, kw_only=True)
class RunResult:
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
    device: str  # of training
    engine: str
    versions: dict[str, str]
    # What earlier versions did not write.
    evaluation: dict[str, Any] = field(default_factory=dict)  # the settings behind all metrics
    measured_on: str = ""  # the device, where it is known
    precision: str = ""  # of training
    data: str = ""  # a hash over which silo trains on which records; another one means other data

    def answers(self, wanted: Collection[str], evaluation: Mapping[str, Any]) -> bool:
        """Whether nothing is left to do: a run that diverged cannot be measured."""
        return self.state == "diverged" or (self.evaluation == evaluation and set(wanted) <= set(self.measured))

    def write(self, path: Path) -> None:
        """The whole file at once."""
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(asdict(self), indent=1) + "\n").encode())


@dataclass(frozen=True)
class Results:
    """All results by their files, whichever table asked for them."""

    found: Mapping[Path, RunResult]

    @classmethod
    def read(cls, *folders: Path) -> Results:
        """Every result file in these folders; no run may have two of them."""
        found: dict[Path, RunResult] = {}
        files: dict[tuple[str, int], Path] = {}
        for path in sorted(path for folder in folders for path in folder.rglob("*.json")):
            result = read_result(path)
            first = files.setdefault((result.config, result.seed), path)
            if first != path:
                raise RunFolderError(f"{first} and {path} are results of one run with seed {result.seed}; keep one")
            found[path] = result
        return cls(found)

    @classmethod
    def of_papers(cls, papers: Path) -> Results:
        """Those of all papers: a run that tables of several ask for lies with the one that asked first."""
        return cls.read(*papers.glob("*/results"))

    def of(self, config: str) -> list[RunResult]:
        """The repetitions of a run, by seed."""
        alike = (result for result in self.found.values() if result.config == config)
        return sorted(alike, key=lambda result: result.seed)

    def file_of(self, config: str, seed: int) -> Path | None:
        """Where a run's result lies, if there is one."""
        return next((path for path, r in self.found.items() if (r.config, r.seed) == (config, seed)), None)


def result_path(paper: Path, table: str, row: str, seed: int) -> Path:
    """Where a run's result is put in the paper's folder, if it has none yet."""
    return paper / "results" / table.partition("/")[2] / f"{row.replace('/', '-')}-seed-{seed}.json"


def evaluation_of(settings: EvaluationConfig) -> dict[str, Any]:
    """What of the settings decides a metric's value, beside its name."""
    return {
        "samples": settings.samples,
        "backbone": settings.backbone,
        "resolution": settings.resolution,
        "importance_samples": settings.importance_samples,
    }


def read_result(path: Path) -> RunResult:
    """The result that a file holds; a file of another version is refused."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        needed = [f.name for f in fields(RunResult) if f.default is MISSING and f.default_factory is MISSING]
        later = [f.name for f in fields(RunResult) if f.name not in needed and f.name in found]
        return RunResult(**{name: found[name] for name in (*needed, *later)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} is not a result file of this version: {error!r}") from error
