"""A run in one line: what it is, how far it is, how good it was at best, what it has spent, and whether it lives."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from fedloom.config import Config
from fedloom.errors import FedloomError
from fedloom.evaluation.metric import metric_title, reading_of
from fedloom.privacy.ledger import format_epsilon
from fedloom.privacy.summary import NONE
from fedloom.reports.logs import UNREADABLE, History, finite, histories, last, read_rows
from fedloom.reports.pictures import newest_picture
from fedloom.reports.verdict import Verdict, verdict_of
from fedloom.reproduction.tables import identity
from fedloom.runs.at_work import is_abandoned, worker_of
from fedloom.runs.folder import RunFolder
from fedloom.runs.metrics import TRAINING, split_key, uncounted
from fedloom.studio.catalogue import FoundRun, check

SPENT = "privacy/epsilon/max"  # in metrics.jsonl
PATIENCE, ROUNDS_OF_PATIENCE = 120.0, 4.0  # seconds, or rounds as long as the last, without a sign of life
# In which order metrics are looked for; the first few that a run has stand in its line.
HEADLINES = ("frechet", "kernel", "domain-hit", "blend", "utility", "probe", "nll", "precision", "recall")
MOST_HEADLINES = 2
# Whatever a round, an evaluation or an end changes.
SIGNS = (
    *("run.toml", "metrics.jsonl", "evaluations.jsonl", "silos.jsonl", "verdict.json"),
    *("status.json", "audit.json", "downstream.json", "checkpoints"),
)


@dataclass(frozen=True)
class Best:
    """A metric at its best: mean over groups where it is of groups."""

    metric: str
    value: float
    round: int
    newest: float | None = field(default=None, compare=False)  # what it has come to

    @property
    def title(self) -> str:
        """What people call it."""
        return metric_title(self.metric)


@dataclass(frozen=True)
class RunSummary:
    """One run; ``problem`` says why it cannot be read, and then the rest is empty."""

    entry: FoundRun
    stamp: str  # changes when anything of the run does
    changed: float  # when that was, in seconds since the epoch
    problem: str = ""
    title: str = ""
    method: str = ""
    data: str = ""
    seed: str = ""  # in digits: one with too many to be written is found where the run is read, not on a page
    rounds_done: int = 0
    rounds_planned: int = 0
    seconds: float | None = None  # of the last round
    best: tuple[Best, ...] = ()
    privacy: str = ""
    epsilon: float | None = None  # spent by the silo that has spent most; None without a mechanism, too
    verdict: Verdict | None = None  # nothing before the end
    ended: str = ""  # "finished" or "diverged", once it is over
    samples: str = ""  # the address of the newest picture of samples, if there is one
    config: Config | None = field(default=None, compare=False)  # the stamp stands for it

    def state(self, now: float) -> str:
        """``running`` while there are signs of life; a run that was killed is ``silent``."""
        if self.problem or self.ended:
            return self.ended or "unreadable"
        if worker_of(self.entry.path) is not None:
            return "running"
        if is_abandoned(self.entry.path):
            return "silent"
        patience = max(PATIENCE, ROUNDS_OF_PATIENCE * (self.seconds or 0.0))
        return "running" if now - self.changed < patience else "silent"

    @cached_property
    def identities(self) -> frozenset[str]:
        """By which the rows of papers' tables know their runs; found when a table asks, because it takes its time."""
        return frozenset() if self.config is None else _identities(self.config)

    @property
    def seconds_left(self) -> float | None:
        """What remains, if rounds go on as the last one did."""
        rounds = finite(max(0, self.rounds_planned - self.rounds_done))
        return None if self.seconds is None or rounds is None else self.seconds * rounds

    @property
    def time_left(self) -> str:
        """The same as a clock shows it; nothing where it is not known, or all is over."""
        if self.ended or not self.seconds_left:
            return ""
        minutes, seconds = divmod(round(min(self.seconds_left, 1e8)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def stamp_of(path: Path) -> tuple[str, float]:
    """A short text that changes with the run's files, and when the newest of them changed."""
    facts, newest = [], 0.0
    for name in SIGNS:
        try:
            found = os.lstat(path / name)
        except OSError:
            continue
        facts.append((name, found.st_size, found.st_mtime_ns, found.st_ino))
        newest = max(newest, found.st_mtime)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16], newest


def run_summary_of(entry: FoundRun) -> RunSummary:
    """Read what the line needs; what is wrong with a run becomes a sentence, and other runs are none the worse."""
    stamp, changed = stamp_of(entry.path)
    try:
        return _read(entry, stamp, changed)
    except (FedloomError, *UNREADABLE) as error:
        problem = str(error)
    except Exception as error:  # whatever nobody has thought of: one damaged run never takes the list down
        problem = f"run '{entry.name}' cannot be read ({type(error).__name__}: {error})"
    return RunSummary(entry, stamp, changed, problem=" ".join(problem.split()))


def _read(entry: FoundRun, stamp: str, changed: float) -> RunSummary:
    check(entry)
    folder = RunFolder.open(entry.path)
    rows, ended = read_rows(entry.path / "metrics.jsonl"), folder.status["state"]
    config, history = folder.config, histories(rows)
    newest = rows[-1] if rows else {"round": 0}
    epsilon = None if config.privacy.mechanism == "none" else last(history.get(SPENT, {}))
    return RunSummary(
        entry,
        stamp,
        changed,
        title=config.name,
        method=config.method.name,
        data=config.data.source,
        seed=str(config.seed),
        rounds_done=min(newest["round"], config.rounds),
        rounds_planned=config.rounds,
        seconds=finite(newest.get("seconds")),
        best=tuple(_headlines(history)),
        privacy=NONE if config.privacy.mechanism == "none" else _spent(epsilon),
        epsilon=epsilon,
        verdict=verdict_of(folder) if ended != "unfinished" else None,
        ended="" if ended == "unfinished" else ended,
        samples=_newest_samples(entry),
        config=config,
    )


def address_of_samples(entry: FoundRun, round_number: int, place: int, file: Path) -> str:
    """Of a picture, by its place among those of its round; another one where the file has changed: browsers keep it."""
    return f"/runs/{entry.key}/samples/{round_number}/{place}?changed={file.lstat().st_mtime_ns}"


def _newest_samples(entry: FoundRun) -> str:
    found = newest_picture(entry.path)
    return "" if found is None else address_of_samples(entry, found[0], 0, found[1])


def _identities(config: Config) -> frozenset[str]:
    """As it is, and without where its data lie, which a row that does not say leaves to whoever runs it."""
    return frozenset({identity(config), identity(replace(config, data=replace(config.data, path="")))})


def _headlines(history: History) -> Iterator[Best]:
    """The best value over rounds of the first few metrics that have a better side; else the newest loss."""
    families: dict[str, dict[str, Mapping[int, float | None]]] = {}
    for key, values in history.items():
        metric, whose = split_key(uncounted(key))
        if (reading := reading_of(key)) and reading.better and "/silo=" not in key:
            families.setdefault(metric, {})[whose] = values
    order = sorted(families, key=_place)
    for metric in order[:MOST_HEADLINES]:
        by = families[metric]
        rounds = _means([by[""]] if "" in by else list(by.values()))
        if rounds:
            reading = reading_of(metric)
            better = max if reading and reading.better == "higher" else min
            value, round_number = better((value, number) for number, value in rounds.items())
            yield Best(metric, value, round_number, rounds[max(rounds)])
    if not families:
        losses = {key: values for key, values in history.items() if key.startswith(TRAINING)}
        for key, values in list(losses.items())[:1]:
            newest = last(values)
            if newest is not None:
                yield Best(key.removeprefix(TRAINING), newest, max(values))


def _place(metric: str) -> tuple[int, str]:
    name = metric.partition("/")[0]
    return (HEADLINES.index(name) if name in HEADLINES else len(HEADLINES), metric)


def _means(columns: list[Mapping[int, float | None]]) -> dict[int, float]:
    """Over columns, of those rounds in which all have a value."""
    rounds = set.intersection(*(set(column) for column in columns))
    found = {number: [column[number] for column in columns] for number in sorted(rounds)}
    return {
        number: fmean(known)
        for number, values in found.items()
        if len(known := [value for value in values if value is not None]) == len(columns)
    }


def _spent(epsilon: float | None) -> str:
    return "nothing spent yet" if epsilon is None else f"ε {format_epsilon(epsilon)}"
