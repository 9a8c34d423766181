"""Rows of tables become trials of a sweep; each run is measured when it has ended, and its result written at once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from fedloom.config import EvaluationConfig
from fedloom.downstream.stage import downstream
from fedloom.engines.choice import device_of
from fedloom.errors import FedloomWarning
from fedloom.experiment import Observer, Run, load
from fedloom.federation.records import Federation
from fedloom.reproduction.figures import add_to_figures
from fedloom.reproduction.results import Result, Results, result_path
from fedloom.reproduction.tables import Row, Table
from fedloom.sweep import Federations, Outcome, Pack, Trial, packs_of, train_pack

DOWNSTREAM = "downstream"  # beside the names of metrics
FID = ("frechet", "inception-score")  # what the network of the standard FID is asked for
INCEPTION = "inception-2015"
PAUSE = 0.5  # seconds between two looks at the workers
Observe = Callable[[Sequence[Trial]], AbstractContextManager[Observer]]


@dataclass(frozen=True)
class Task:
    """A run that a table needs."""

    table: str
    row: Row
    identity: str  # of the row
    trial: Trial
    settings: EvaluationConfig
    wanted: tuple[str, ...]  # all that must have been measured
    result: Path

    @property
    def paper(self) -> Path:
        """The paper's folder."""
        return self.result.parents[2]


@dataclass(frozen=True)
class Work:
    """Where runs go, how many train together, and the network of the standard FID, where there is one."""

    out: Path
    pack: Pack = "auto"
    inception: str = ""  # a file of weights


@contextmanager
def unobserved(_: Sequence[Trial]) -> Iterator[Observer]:
    """Nobody looks on."""
    yield Observer()


def tasks_of(
    tables: Sequence[Table],
    papers: Path,
    *,
    rows: Sequence[str] = (),
    seeds: int = 3,
    more: Sequence[str] = (),
    inception: str = "",
) -> list[Task]:
    """What no result file holds yet, one seed after the other; a run that several tables share is one task."""
    tasks: dict[tuple[str, int], Task] = {}
    chosen = [(table, row, row.identity) for table in tables for row in table.chosen(rows) if row.preset]
    for seed in range(seeds):
        for table, row, known_as in chosen:
            config = row.config(seed, more)
            settings = table.settings(row, config)
            key = known_as, seed
            extra = [DOWNSTREAM] * table.downstream + [f"{INCEPTION}/{name}" for name in FID if inception]
            earlier = tasks[key].wanted if key in tasks else ()
            wanted = tuple(dict.fromkeys([*earlier, *settings.metrics, *extra]))
            if key in tasks:
                tasks[key] = replace(tasks[key], wanted=wanted)
                continue
            # What is measured is asked for afterwards, so that it is no part of what a run folder is.
            plain = replace(config, evaluation=EvaluationConfig(metrics=(), trackers=()))
            name = "-".join((*table.name.split("/"), *row.id.split("/"), f"seed-{seed}"))
            path = result_path(papers / table.paper, table.name, row.id, seed)
            tasks[key] = Task(table.name, row, known_as, Trial(name, plain), settings, wanted, path)
    known = {table.paper: Results.read(papers / table.paper / "results") for table in tables}
    return [
        task
        for (config, seed), task in tasks.items()
        if not known[task.table.partition("/")[0]].holds(config, seed, set(task.wanted))
    ]


def carry_out(
    tasks: Sequence[Task],
    work: Work,
    observe: Observe = unobserved,
    *,
    workers: int = 1,
    seconds: float = float("inf"),
) -> dict[str, Outcome]:
    """Train and measure; what is not done after so many seconds is left for the next time."""
    federations = Federations()
    for config in {task.trial.config.data: task.trial.config for task in tasks}.values():
        federations.data(config)  # complains before anything starts
    by_name = {task.trial.name: task for task in tasks}
    packs = packs_of([task.trial for task in tasks], work.out, work.pack, federations)
    assigned = [[by_name[trial.name] for trial in pack] for pack in packs]
    if workers == 1 and seconds == float("inf"):
        outcomes: dict[str, Outcome] = {}
        for pack in assigned:
            outcomes |= _carried_out(pack, work, observe, federations)
            _picture(pack, work)
        return outcomes
    _in_processes(assigned, work, workers, time.monotonic() + seconds)
    _picture(tasks, work)
    return {task.trial.name: _outcome_of(task, work) for task in tasks}


def _carried_out(tasks: Sequence[Task], work: Work, observe: Observe, federations: Federations) -> dict[str, Outcome]:
    trials = [task.trial for task in tasks]
    with observe(trials) as observer:
        outcomes = train_pack(trials, work.out, observer, federations)
    for task in tasks:
        if outcomes[task.trial.name].state != "failed":
            run = load(work.out / task.trial.name)
            _measured(run, task, work, federations.data(task.trial.config)).write(task.result)
    return outcomes


def _picture(tasks: Sequence[Task], work: Work) -> None:
    for paper in {task.paper for task in tasks}:
        ended = [task for task in tasks if task.paper == paper and task.result.is_file()]
        # Several seeds of a run have one identity, and the first of them is shown.
        runs = {task.identity: load(work.out / task.trial.name) for task in reversed(ended)}
        add_to_figures(runs, paper)


def _measured(run: Run, task: Task, work: Work, federation: Federation) -> Result:
    """Measure what has not been, and put the run's whole story together."""
    status, folder = run.folder.status, run.folder
    have: list[str] = folder.environment.get("measured", [])
    spent: float = folder.environment.get("measuring_seconds", 0.0)
    missing = [name for name in task.wanted if name not in have] if status["state"] == "finished" else []
    start = time.perf_counter()
    device = device_of(task.trial.config.engine).type
    if own := tuple(name for name in missing if "/" not in name and name != DOWNSTREAM):
        run.evaluate(settings=replace(task.settings, metrics=own), device=device, federation=federation)
    if fid := tuple(name.partition("/")[2] for name in missing if name.startswith(INCEPTION)):
        settings = replace(task.settings, metrics=fid, backbone=INCEPTION, resolution=0, weights=work.inception)
        run.evaluate(settings=settings, device=device, federation=federation)
    if DOWNSTREAM in missing:
        downstream(run, federation=federation)
    folder.note({"measured": [*have, *missing], "measuring_seconds": spent + time.perf_counter() - start})
    return _result(run, task)


def _result(run: Run, task: Task) -> Result:
    facts, status, rows = run.folder.environment, run.folder.status, run.metrics()
    last = rows[-1] if rows else {}
    account = {key: value for key, value in last.items() if key.startswith("privacy/")}
    return Result(
        row=f"{task.table} {task.row.id}",
        preset=task.row.preset,
        overrides=list(task.row.overrides),
        config=task.identity,
        seed=task.trial.config.seed,
        state=status["state"],
        reason=status["reason"],
        rounds=status["round"],
        measured=facts["measured"],
        metrics={**account, **run.folder.latest_metrics(), **_of_heads(run.folder.downstream)},
        seconds={"training": sum(row["seconds"] for row in rows), "measuring": facts["measuring_seconds"]},
        device=_device_name(device_of(task.trial.config.engine)),
        engine=facts.get("engine", ""),
        versions={"fedloom": facts["fedloom"], "python": facts["python"], **facts["packages"]},
    )


def _of_heads(found: Mapping[str, Any]) -> dict[str, float]:
    """Accuracies of heads and mixtures, mean over silos, as metrics."""
    return {
        f"{DOWNSTREAM}/{row}/{test}/{name}": scores[test][name]
        for row, scores in found.get("rows", {}).items()
        for test in scores
        for name in ("accuracy", "balanced_accuracy")
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _in_processes(packs: Sequence[Sequence[Task]], work: Work, workers: int, deadline: float) -> None:
    """Several packs at a time, each in a process of its own: one pack alone hardly fills a GPU."""
    context = get_context("spawn")
    waiting, running = list(packs), list[BaseProcess]()
    try:
        while (waiting or running) and time.monotonic() < deadline:
            running = [process for process in running if process.is_alive()]
            while waiting and len(running) < workers:
                process = context.Process(target=_work, args=(waiting.pop(0), work, workers))
                process.start()
                running.append(process)
            time.sleep(PAUSE)
    finally:
        for left in running:
            left.terminate()
        for left in running:
            left.join()


def _work(tasks: Sequence[Task], work: Work, workers: int) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    for name, outcome in _carried_out(tasks, work, unobserved, Federations()).items():
        if outcome.state == "failed":
            warnings.warn(f"{name}: {outcome.reason} {outcome.trace}", FedloomWarning, stacklevel=1)


def _outcome_of(task: Task, work: Work) -> Outcome:
    """How a run of another process stands."""
    if task.result.is_file() or not (work.out / task.trial.name).is_dir():
        state = "finished" if task.result.is_file() else "unfinished"
        return Outcome(state)
    status = load(work.out / task.trial.name).folder.status
    return Outcome("unfinished" if status["state"] == "finished" else status["state"], status["reason"])
