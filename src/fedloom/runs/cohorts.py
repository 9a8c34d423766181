"""Repetitions: runs that differ in nothing but the seed, and what their metrics are on average."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.runs.folder import RunFolder


@dataclass(frozen=True)
class Summary:
    """A metric over the runs that have it; one run has no deviation."""

    mean: float
    deviation: float | None  # sample standard deviation
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """The summary of at least one value."""
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation, len(values))


@dataclass(frozen=True)
class Cohort:
    """Runs of one experiment with different seeds."""

    runs: tuple[RunFolder, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each run."""
        return tuple(run.config.seed for run in self.runs)

    def metrics(self) -> dict[str, Summary]:
        """The newest value of every metric that some run has, over those runs."""
        values: dict[str, list[float]] = {}
        for run in self.runs:
            for key, value in run.latest_metrics().items():
                values.setdefault(key, []).append(value)
        return {key: Summary.of(found) for key, found in values.items()}


def cohorts(runs: Sequence[RunFolder]) -> list[Cohort]:
    """Runs by experiment, in the order given; two with the same seed are no repetitions and stay apart."""
    found: list[tuple[str, list[RunFolder]]] = []
    for run in runs:
        digest = run.config.digest_without_seed()
        for other, members in found:
            if other == digest and all(member.config.seed != run.config.seed for member in members):
                members.append(run)
                break
        else:
            found.append((digest, [run]))
    return [Cohort(tuple(members)) for _, members in found]
