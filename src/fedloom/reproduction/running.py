"""Rows of tables become trials of a sweep; each run is measured when it has ended, and its result written at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from fedloom.cluster import Cluster, JobCall
from fedloom.config import Config, EvaluationConfig
from fedloom.engines.choice import device_of
from fedloom.errors import ConfigError
from fedloom.experiment import Observer, Run, load
from fedloom.federation.records import Federation
from fedloom.reproduction.figures import add_to_figures, draw_latents
from fedloom.reproduction.results import Results, RunResult, evaluation_of, read_result, result_path
from fedloom.reproduction.stages import STAGES
from fedloom.reproduction.tables import Row, Table, chosen_rows, paper_names
from fedloom.sweep import Federations, Outcome, Pack, Trial, packs_of, train_pack

FID = ("frechet", "inception-score")  # what the network of the standard FID is asked for
INCEPTION = "inception-2015"
MEASURED = "reproduction"  # what has been measured, in a run's environment.json
PAUSE = 0.5  # seconds between two looks at the workers
Observe = Callable[[Sequence[Trial]], AbstractContextManager[Observer]]


@dataclass(frozen=True)
class NeededRun:
    """A run that a table needs."""

    table: str
    row: Row
    identity: str  # of the row
    trial: Trial
    settings: EvaluationConfig
    wanted: tuple[str, ...]  # all that must have been measured
    paper: Path
    result: Path
    earlier: RunResult | None  # what is there already

    @property
    def evaluation(self) -> dict[str, Any]:
        """The settings that its metrics depend on."""
        return evaluation_of(self.settings)


@dataclass(frozen=True)
class Work:
    """Where runs go, how many train together, and the network of the standard FID, where there is one."""

    out: Path
    pack: Pack = "auto"
    inception: str = ""  # a file of weights


@contextmanager
def unobserved(_: Sequence[Trial]) -> Iterator[Observer]:
    """An observer that nobody looks at."""
    yield Observer()


def tasks_of(
    tables: Sequence[Table],
    papers: Path,
    *,
    rows: Sequence[str] = (),
    seeds: int = 3,
    more: Sequence[str] = (),
    inception: str = "",
) -> list[NeededRun]:
    """What no result file holds yet, one seed after the other; a run that several tables share is one task."""
    tasks: dict[tuple[str, int], NeededRun] = {}
    known = Results.of_papers(papers)
    chosen = [(table, row, row.identity) for table, row in chosen_rows(tables, rows) if row.preset]
    for seed in range(seeds):
        for table, row, known_as in chosen:
            config = row.config(seed, more)
            settings = table.settings(row, config)
            key = known_as, seed
            wanted = (*settings.metrics, *table.stages(seed), *(f"{INCEPTION}/{name}" for name in FID if inception))
            if key not in tasks:
                tasks[key] = _task(table, row, known_as, config, settings, papers / table.paper, known)
            elif tasks[key].evaluation != evaluation_of(settings):
                raise ConfigError(_conflict(tasks[key], table, row, settings))
            tasks[key] = replace(tasks[key], wanted=tuple(dict.fromkeys([*tasks[key].wanted, *wanted])))
    return [
        task for task in tasks.values() if not (task.earlier and task.earlier.answers(task.wanted, task.evaluation))
    ]


def _task(
    table: Table, row: Row, known_as: str, config: Config, settings: EvaluationConfig, paper: Path, known: Results
) -> NeededRun:
    """A run under the name and in the file that it has, if another table asked for it before."""
    found = known.file_of(known_as, config.seed)
    path = found or result_path(paper, table.name, row.id, config.seed)
    asker, _, *rest = path.relative_to(paper.parent).with_suffix("").parts
    name = "-".join((asker, *rest))
    # What is measured is asked for afterwards, so that it is no part of what a run folder is.
    plain = replace(config, evaluation=EvaluationConfig(metrics=(), trackers=()))
    earlier = known.found[found] if found else None
    return NeededRun(table.name, row, known_as, Trial(name, plain), settings, (), paper, path, earlier)


def _conflict(task: NeededRun, table: Table, row: Row, settings: EvaluationConfig) -> str:
    other = evaluation_of(settings)
    name = next(name for name, value in task.evaluation.items() if other[name] != value)
    return (
        f"'{task.row.id}' of {task.table} and '{row.id}' of {table.name} are one run, but evaluation.{name} is "
        f"{task.evaluation[name]!r} in the one and {other[name]!r} in the other: make them equal"
    )


def carry_out(
    tasks: Sequence[NeededRun],
    work: Work,
    observe: Observe = unobserved,
    *,
    workers: int = 1,
    seconds: float = float("inf"),
    cluster: Cluster | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Outcome]:
    """Train and measure, by jobs where there is a cluster; what is not done after so many seconds is left for later."""
    federations = Federations()
    for config in {task.trial.config.data: task.trial.config for task in tasks}.values():
        federations.data(config)  # complains before anything starts
    by_name = {task.trial.name: task for task in tasks}
    packs = packs_of([task.trial for task in tasks], work.out, work.pack, federations)
    assigned = [[by_name[trial.name] for trial in pack] for pack in packs]
    if cluster is not None:
        calls = [JobCall(tuple(task.trial.name for task in pack), partial(_job, pack, work)) for pack in assigned]
        failed = {name: Outcome(**found) for name, found in cluster.carry_out(calls, say).items()}
        _picture(tasks, work)
        return {task.trial.name: _outcome_of(task, failed) for task in tasks}
    if workers == 1 and seconds == float("inf"):
        outcomes: dict[str, Outcome] = {}
        for pack in assigned:
            outcomes |= _carried_out(pack, work, observe, federations)
            _picture(pack, work)
        return outcomes
    failed = _in_processes(assigned, work, workers, time.monotonic() + seconds)
    _picture(tasks, work)
    return {task.trial.name: _outcome_of(task, failed) for task in tasks}


def _carried_out(
    tasks: Sequence[NeededRun], work: Work, observe: Observe, federations: Federations
) -> dict[str, Outcome]:
    trials = [task.trial for task in tasks]
    with observe(trials) as observer:
        outcomes = train_pack(trials, work.out, observer, federations)
    for task in tasks:
        if outcomes[task.trial.name].state == "failed":
            continue
        run, federation = load(work.out / task.trial.name), federations.data(task.trial.config)
        try:
            result = _measured(run, task, work, federation)
        except Exception as error:  # of this run: the others of its pack are measured all the same
            outcomes[task.trial.name] = Outcome.of(error)
            continue
        result.write(task.result)
        if task.trial.config.seed == 0 and result.state == "finished":
            draw_latents(run, task.identity, task.paper, federation, device_of(task.trial.config.engine).type)
    return outcomes


def _picture(tasks: Sequence[NeededRun], work: Work) -> None:
    ended = [(task.identity, work.out / task.trial.name) for task in tasks if task.result.is_file()]
    # Several seeds of a run have one identity, and the first of them is shown.
    runs = {key: load(folder) for key, folder in reversed(ended) if folder.is_dir()}
    for papers in {task.paper.parent for task in tasks}:
        for paper in filter(Path.is_dir, (papers / name for name in paper_names())):
            add_to_figures(runs, paper)


def _measured(run: Run, task: NeededRun, work: Work, federation: Federation) -> RunResult:
    """Measure what has not been with these settings, and put the run's whole story together."""
    folder, device = run.folder, device_of(task.trial.config.engine)
    kept: dict[str, Any] = folder.environment.get(MEASURED, {})
    if kept.get("evaluation") != task.evaluation:
        kept = {"evaluation": task.evaluation, "names": [], "metrics": {}, "seconds": 0.0, "device": ""}
    # What another table had measured belongs to the run's only file, and must be of this very training.
    before = [name for name in (task.earlier.measured if task.earlier else []) if work.inception or "/" not in name]
    missing = [name for name in dict.fromkeys([*before, *task.wanted]) if name not in kept["names"]]
    if folder.status["state"] == "finished" and missing:
        start = time.perf_counter()
        found = _metrics(run, task, work, federation, missing, device.type)
        kept = {
            "evaluation": task.evaluation,
            "names": [*kept["names"], *missing],
            "metrics": {**kept["metrics"], **found},
            "seconds": kept["seconds"] + time.perf_counter() - start,
            "device": " and ".join(dict.fromkeys(filter(None, (kept["device"], _device_name(device))))),
        }
        folder.note({MEASURED: kept})
    return _result(run, task, kept, federation.digest)


def _metrics(
    run: Run, task: NeededRun, work: Work, federation: Federation, missing: Sequence[str], device: str
) -> dict[str, float]:
    found: dict[str, float] = {}
    if own := tuple(name for name in missing if "/" not in name and name not in STAGES):
        found |= run.evaluate(settings=replace(task.settings, metrics=own), device=device, federation=federation)
    if fid := tuple(name.partition("/")[2] for name in missing if name.startswith(INCEPTION)):
        settings = replace(task.settings, metrics=fid, backbone=INCEPTION, resolution=0, weights=work.inception)
        found |= run.evaluate(settings=settings, device=device, federation=federation)
    for name in (name for name in missing if name in STAGES):
        found |= STAGES[name](run, task.row, federation, device)
    return found


def _result(run: Run, task: NeededRun, kept: Mapping[str, Any], data: str) -> RunResult:
    facts, status, rows = run.folder.environment, run.folder.status, run.metrics()
    last = rows[-1] if rows else {}
    account = {key: value for key, value in last.items() if key.startswith("privacy/")}
    first = task.earlier
    return RunResult(
        row=first.row if first else f"{task.table} {task.row.id}",
        preset=first.preset if first else task.row.preset,
        overrides=first.overrides if first else list(task.row.overrides),
        config=task.identity,
        seed=task.trial.config.seed,
        state=status["state"],
        reason=status["reason"],
        rounds=status["round"],
        measured=kept["names"],
        metrics={**account, **kept["metrics"]},
        seconds={"training": sum(row["seconds"] for row in rows), "measuring": kept["seconds"]},
        device=_trained_on(facts),
        engine=facts.get("engine", ""),
        versions={"fedloom": facts["fedloom"], "python": facts["python"], **facts["packages"]},
        evaluation=kept["evaluation"],
        measured_on=kept["device"],
        precision=run.folder.config.engine.precision,
        data=data,
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _trained_on(facts: Mapping[str, Any]) -> str:
    """The device's name as training noted it: measuring may come later, elsewhere."""
    if facts.get("engine_choice", {}).get("device") != "cuda":
        return "CPU"
    name: str = facts["engine"].partition(" on ")[2]  # "fused on NVIDIA H200, tf32, ..."
    return name.partition(",")[0]


@dataclass(frozen=True)
class Worker:
    """A process with a pack of its own, which says at its end which runs have failed."""

    process: BaseProcess
    tasks: Sequence[NeededRun]
    report: Connection

    def failed(self) -> dict[str, Outcome]:
        """By the runs' names, at its end; where it could not say anything, all that it had failed."""
        found: dict[str, Outcome] | None = None
        with suppress(EOFError):
            found = self.report.recv()
        self.process.join()
        dead = Outcome("failed", f"its process ended with exit code {self.process.exitcode}")
        return {task.trial.name: dead for task in self.tasks} if found is None else found


def _in_processes(
    packs: Sequence[Sequence[NeededRun]], work: Work, workers: int, deadline: float
) -> dict[str, Outcome]:
    """Several packs at a time, each in a process of its own: one trains while another is measured.

    Returns what has failed; what is not done at the deadline has not.
    """
    waiting, running = list(packs), list[Worker]()
    failed: dict[str, Outcome] = {}
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < workers:
                running.append(_worker(waiting.pop(0), work, workers))
            time.sleep(PAUSE)
            for ended in [worker for worker in running if worker.report.poll()]:
                failed |= ended.failed()
                running.remove(ended)
    finally:
        for left in running:
            left.process.terminate()
        for left in running:
            left.process.join()
    return failed


def _worker(tasks: Sequence[NeededRun], work: Work, workers: int) -> Worker:
    context = get_context("spawn")
    report, end = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(tasks, work, workers, end))
    process.start()
    end.close()  # so that the worker's end is the only one, and its death is heard
    return Worker(process, tasks, report)


def _work(tasks: Sequence[NeededRun], work: Work, workers: int, report: Connection) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    report.send(_failures(tasks, work))


def _job(tasks: Sequence[NeededRun], work: Work) -> dict[str, dict[str, str]]:
    """What a job does: a pack; it says what has failed."""
    return {name: asdict(outcome) for name, outcome in _failures(tasks, work).items()}


def _failures(tasks: Sequence[NeededRun], work: Work) -> dict[str, Outcome]:
    """Carry a pack out; returns what has failed."""
    try:
        outcomes = _carried_out(tasks, work, unobserved, Federations())
    except Exception as error:
        outcomes = {task.trial.name: Outcome.of(error) for task in tasks}
    return {name: outcome for name, outcome in outcomes.items() if outcome.state == "failed"}


def _outcome_of(task: NeededRun, failed: Mapping[str, Outcome]) -> Outcome:
    """How a run of another process stands; a pack may fail after some of its runs have left their results."""
    if task.result.is_file():
        result = read_result(task.result)
        if result.answers(task.wanted, task.evaluation):
            return Outcome(result.state, result.reason)
    return failed.get(task.trial.name, Outcome("unfinished"))
