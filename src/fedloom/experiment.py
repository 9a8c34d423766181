"""An experiment ties data, method, engine and evaluation together, and lives through its rounds."""

from __future__ import annotations

import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.config import Config, EngineConfig, EvaluationConfig, parse
from fedloom.engines.base import (
    Engine,
    FederationState,
    Job,
    Outcome,
    Result,
    RoundReport,
    SiloState,
    initial_state,
    participants_of,
)
from fedloom.engines.charging import Charging, noise_source, silo_plans
from fedloom.engines.choice import device_of, make_engine
from fedloom.engines.training import MODEL, Trainer
from fedloom.errors import ConfigError, RunFolderError
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.suite import METRICS, Evaluator
from fedloom.federation.building import build_federation
from fedloom.federation.canaries import with_canaries
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Method, ServerState, Setting, make_method
from fedloom.methods.generator import Generator
from fedloom.runs.checkpoint import BLOCKS, MEMORY, Checkpoint, load_checkpoint, save_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.runs.health import ailment
from fedloom.runs.images import save_grid
from fedloom.runs.stacks import Overflow
from fedloom.runs.trackers import check_trackers, open_trackers
from fedloom.sharing.plan import BlockKey, Tensors
from fedloom.sharing.update import DivergedError
from fedloom.streams import Streams

GRID = 64  # images in a sample grid
Rounds = typing.Generator[
    Job, tuple[FederationState, RoundReport, float], None
]  # asked for; given, with seconds of training
OF_RECORDS = {"likelihood", "probe", "memorisation", "gradients"}  # metrics that look at the records of silos


class Observer:
    """Hears how a run goes on; this one does nothing with it."""

    def started(self, experiment: Experiment, engine: Engine, rounds_done: int) -> None:
        """The engine is ready."""

    def silo_done(self, context: RoundContext, result: Result) -> None:
        """A silo finished its part of a round."""

    def round_done(self, report: RoundReport, metrics: dict[str, float], seconds: float) -> None:
        """A round is over and on disk."""


@dataclass(frozen=True)
class Experiment:
    """Data and method in place, ready to run."""

    config: Config
    federation: Federation
    method: Method

    @classmethod
    def of(cls, config: Config, federation: Federation | None = None) -> Experiment:
        """Prepare what the configuration asks for, on the federation given or the one that it describes."""
        config = parse(Config, config.to_mapping())  # a tree made in Python passes the same checks as a file
        if config.local.updates == "matched" and config.data.layout == "federated":
            raise ConfigError(
                "local.updates = 'matched' is for data.layout = 'centralised': it matches a federated run"
            )
        if federation is None:
            federation = build_federation(config.data, Streams(config.seed))
        elif config.data.layout == "centralised":
            federation = federation.centralised()
        federation = with_canaries(federation, config.audit, Streams(config.seed))
        method = make_method(setting_of(config, federation))
        if method.labelled:
            federation.require_labels(method.name)
        return cls(config, federation, method)

    @cached_property
    def streams(self) -> Streams:
        """The random streams."""
        return Streams(self.config.seed)

    @cached_property
    def trainer(self) -> Trainer:
        """What trains a silo, under the privacy that the configuration asks for."""
        if self.federation.is_remote:  # each silo plans for itself
            return Trainer(self.config, self.method, self.federation)
        rounds = [self._context(number).participants for number in range(1, self.config.rounds + 1)]
        plans = silo_plans(self.config, self.federation, self.method, rounds)
        method = replace(self.method, summed=bool(plans) and self.config.privacy.trust == "distributed")
        return Trainer(self.config, method, self.federation, plans)

    def run(self, out: Path | str, observer: Observer | None = None, engine: Engine | None = None) -> Run:
        """Train from the start into a new folder, on the engine given or the one that the configuration asks for."""
        return self.begin(out, observer).alone(engine)

    def resume(self, folder: RunFolder, observer: Observer | None = None, engine: Engine | None = None) -> Run:
        """Go on from the newest checkpoint, exactly as if nothing had happened."""
        return self.take_up(folder, observer).alone(engine)

    def begin(self, out: Path | str, observer: Observer | None = None) -> Life:
        """A run before its first round, in a new folder."""
        check_trackers(self.config)
        evaluator = self._evaluator()  # complains before the folder exists
        # Models are built before the folder exists, so that networks that do not fit the data leave nothing behind.
        state = initial_state(self.method, self.federation, self.config)
        self.trainer.check_privacy()
        folder = RunFolder.create(Path(out), self.config)
        return Life(self, folder, state, evaluator, observer or Observer())

    def take_up(self, folder: RunFolder, observer: Observer | None = None) -> Life:
        """A run as its newest checkpoint left it."""
        evaluator = self._evaluator()
        state = initial_state(self.method, self.federation, self.config)
        if folder.rounds_done:
            checkpoint = load_checkpoint(folder.path)
            self._check_same_experiment(folder, checkpoint)
            state = restored(checkpoint, self.federation)
        folder.rewind(state.round)
        return Life(self, folder, state, evaluator, observer or Observer())

    def _evaluator(self) -> Evaluator:
        """What measures the run, on the device that trains it.

        A server without its silos' records has what it can be told by a public set alone.
        """
        settings = self.config.evaluation
        if self.federation.is_remote:
            allowed = set(METRICS) - OF_RECORDS if len(self.federation.test) else set()
            settings = replace(settings, metrics=tuple(name for name in settings.metrics if name in allowed))
        return Evaluator(self.federation, settings, self.streams, device_of(self.config.engine))

    def rounds(
        self, folder: RunFolder, state: FederationState, evaluator: Evaluator, engine: Engine, observer: Observer
    ) -> Rounds:
        """All that happens around the engine's part of each round."""
        folder.keep_coins({found.silo: found.included.tolist() for found in self.federation.canaries})
        trackers = open_trackers(self.config, folder.path, state.round)
        source = noise_source(engine.choice())
        charging = Charging(self.trainer, folder.ledger, source) if self.trainer.privacy else None
        overflow = Overflow(folder.overflow, int(self.config.engine.state_memory * 1e6))
        folder.note({"engine": engine.describe(), "engine_choice": engine.choice()})
        try:
            for kept in state.silos.values():
                overflow.admit(kept)
            observer.started(self, engine, state.round)
            while state.round < self.config.rounds:
                start = time.perf_counter()
                context = self._context(state.round + 1)
                if charging is not None:
                    context = charging.admitted(state, context)
                before = time.perf_counter() - start
                state, report, training = yield Job(state, context, partial(_silo_done, overflow, observer, context))
                start = time.perf_counter() - before - training  # other runs' work in between is not counted
                row, egress = self._row(report), [record.to_mapping() for record in report.egress]
                row["seconds"] = time.perf_counter() - start
                if charging is not None:
                    row |= charging.metrics()
                metrics = self._evaluate(folder, state, evaluator, row, egress)
                row["seconds"] = seconds = time.perf_counter() - start
                folder.record_round(row | metrics, egress)
                for tracker in trackers:
                    tracker.record(state.round, row | metrics)
                if reason := ailment(folder.metrics(), self.config.rounds):
                    folder.end("diverged", state.round, reason)
                    return
                if state.round % self.config.engine.checkpoint_every == 0 or state.round == self.config.rounds:
                    keep = self.config.engine.keep_checkpoints
                    save_checkpoint(folder.path, self._checkpoint(state, report.context.participants), keep)
                observer.round_done(report, metrics, seconds)
            folder.end("finished", state.round)
        except DivergedError as error:
            folder.end("diverged", state.round + 1, str(error))
        except RunFolderError as error:
            hint = f"all up to the last checkpoint is kept: 'fedloom resume {folder.path}' goes on from it"
            raise RunFolderError(f"{error}; {hint}") from error
        finally:
            overflow.close()
            if charging is not None:
                charging.close()
            for tracker in trackers:
                tracker.close()

    def _context(self, number: int) -> RoundContext:
        """Who takes part in a round."""
        return RoundContext(number, self.config.rounds, participants_of(self.config, self.federation, number))

    def _row(self, report: RoundReport) -> dict[str, Any]:
        """What metrics.jsonl says of a round beside its metrics."""
        context = report.context
        row = {"round": context.round, "seconds": 0.0, "participants": context.participants, "steps": report.steps}
        return row | {f"train/{name}": value for name, value in report.terms.items()}

    def _evaluate(
        self,
        folder: RunFolder,
        state: FederationState,
        evaluator: Evaluator,
        row: dict[str, Any],
        egress: list[dict[str, Any]],
    ) -> dict[str, float]:
        """Metrics and sample grids, when they are due; this round's log lines are not yet in the folder."""
        every = self.config.evaluation.every
        if state.round != self.config.rounds and (every == 0 or state.round % every):
            return {}
        generator = Generator(self.method, state.server, self.federation.groups, self.federation.classes)
        if len(self.federation.shape) == 3 and generator.pathways:
            samples = folder.samples_of(state.round)
            for group in self.federation.groups:
                way, device = generator.pathways[0], evaluator.device
                images = generator.sample(GRID, group=group, seed=self.config.seed, pathway=way, device=device)
                save_grid(images, samples / f"{file_name(group)}.png")
        rounds, left = [*folder.metrics(), row], [*folder.egress(), *egress]
        return evaluator.evaluate(generator, KeptModels(state, self.federation), rounds, left)

    def _checkpoint(self, state: FederationState, chosen: tuple[int, ...]) -> Checkpoint:
        server: Tensors = {f"{BLOCKS}{k}/{n}": t for k, part in state.server.blocks.items() for n, t in part.items()}
        server |= {f"{MEMORY}{name}": tensor for name, tensor in state.server.memory.items()}
        facts = {
            "config": self.config.digest(),
            "streams": {"seed": self.config.seed},
            "participants": list(chosen),
            "federation": self.federation.digest,
            "setting": {
                "shape": list(self.federation.shape),
                "groups": list(self.federation.groups),
                "classes": list(self.federation.classes),
            },
        }
        silos = {self.federation.silos[i].name: state.silos[i].source for i in sorted(state.silos)}
        return Checkpoint(state.round, server, silos, facts)

    def _check_same_experiment(self, folder: RunFolder, checkpoint: Checkpoint) -> None:
        if checkpoint.facts.get("config") != self.config.digest():
            raise RunFolderError(f"{folder.path}: run.toml is not the one that its checkpoints were made with")
        if checkpoint.facts.get("federation") != self.federation.digest:
            raise RunFolderError(f"{folder.path}: the data have changed since its checkpoints were made")


@dataclass(frozen=True)
class Life:
    """A run from where it stands to its end."""

    experiment: Experiment
    folder: RunFolder
    state: FederationState
    evaluator: Evaluator
    observer: Observer

    def alone(self, given: Engine | None = None) -> Run:
        """Live with an engine of its own: the one given, or the one that the configuration asks for."""
        if self.folder.status["state"] == "unfinished":
            engine = given or make_engine(self.experiment.trainer, self.state, self.earlier_choice)
            try:
                failures = live_together([self], engine, lambda jobs: {0: _attempted(engine, jobs[0])})
            finally:
                engine.close()
            if failures:
                raise failures[0]
        return Run(self.folder)

    @property
    def earlier_choice(self) -> dict[str, Any]:
        """What the engine chose before the run was stopped: other choices may change the last bit."""
        choice: dict[str, Any] = self.folder.environment.get("engine_choice", {})
        return choice

    def rounds(self, engine: Engine) -> Rounds:
        """Asks for one round after the other, and is told what came of it."""
        return self.experiment.rounds(self.folder, self.state, self.evaluator, engine, self.observer)


def live_together(
    lives: Sequence[Life], engine: Engine, carry_out: Callable[[Mapping[int, Job]], Mapping[int, Outcome]]
) -> dict[int, Exception]:
    """Live through the rounds of runs that share an engine; returns what went wrong, and in which of them.

    Those furthest behind go first, so that runs that were stopped in different rounds soon go on together.
    """
    failures: dict[int, Exception] = {}
    everyone = [life.rounds(engine) for life in lives]

    def asked(run: int, outcome: Outcome | None, seconds: float = 0.0) -> dict[int, Job]:
        try:
            if outcome is None:
                return {run: next(everyone[run])}
            if isinstance(outcome, Exception):
                return {run: everyone[run].throw(outcome)}
            return {run: everyone[run].send((*outcome, seconds))}
        except StopIteration:
            return {}
        except Exception as error:
            failures[run] = error
            return {}

    try:
        jobs = {run: job for number in range(len(lives)) for run, job in asked(number, None).items()}
        while jobs:
            behind = min(job.context.round for job in jobs.values())
            due = {run: job for run, job in jobs.items() if job.context.round == behind}
            start = time.perf_counter()
            outcomes = carry_out(due)
            seconds = (time.perf_counter() - start) / len(due)
            for run in due:
                del jobs[run]
                jobs |= asked(run, outcomes[run], seconds)
    finally:
        for rounds in everyone:
            rounds.close()
    return failures


def _attempted(engine: Engine, job: Job) -> Outcome:
    try:
        return engine.round(job.state, job.context, job.on_silo)
    except Exception as error:
        return error


def _silo_done(overflow: Overflow, observer: Observer, context: RoundContext, result: Result) -> None:
    observer.silo_done(context, result)
    overflow.admit(result.state)


def setting_of(config: Config, federation: Federation) -> Setting:
    """The public facts of a federation that a method is made for."""
    names = tuple(silo.name for silo in federation.silos)
    return Setting(config, federation.shape, federation.groups, federation.classes, names)


def file_name(text: str) -> str:
    """A group's name as a file name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)


def server_state(checkpoint: Checkpoint) -> ServerState:
    """The server's part of a checkpoint."""
    blocks: dict[BlockKey, Tensors] = {}
    memory: Tensors = {}
    for name, tensor in checkpoint.server.items():
        if name.startswith(MEMORY):
            memory[name.removeprefix(MEMORY)] = tensor
        else:
            key, _, parameter = name.removeprefix(BLOCKS).rpartition("/")
            blocks.setdefault(BlockKey.of(key), {})[parameter] = tensor
    return ServerState(blocks, memory)


def restored(checkpoint: Checkpoint, federation: Federation) -> FederationState:
    """A checkpoint as the state it was made from."""
    number = {silo.name: index for index, silo in enumerate(federation.silos)}
    silos = {number[name]: SiloState(tensors) for name, tensors in checkpoint.silos.items()}
    return FederationState(checkpoint.round, server_state(checkpoint), silos)


def torch_device(name: str) -> torch.device:
    """A device by its name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device = '{name}' is not there: torch finds no such device on this machine") from error
    return device


class KeptModels(Mapping[str, Tensors]):
    """What silos keep of their models, by silo and parameter name; looked up one silo at a time."""

    def __init__(self, state: FederationState, federation: Federation) -> None:
        self._kept = {federation.silos[index].name: kept for index, kept in state.silos.items()}

    def __getitem__(self, silo: str) -> Tensors:
        return {n.removeprefix(MODEL): t for n, t in self._kept[silo].tensors.items() if n.startswith(MODEL)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


@dataclass(frozen=True)
class Run:
    """A run folder, and what can be asked of it."""

    folder: RunFolder

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.folder.config

    def metrics(self) -> list[dict[str, Any]]:
        """One row for each round."""
        return self.folder.metrics()

    def generator(self, round_number: int | None = None) -> Generator:
        """The generators after a round, by default the newest that was kept; no training data are needed."""
        checkpoint = load_checkpoint(self.folder.path, round_number)
        public = checkpoint.facts["setting"]
        setting = Setting(self.config, tuple(public["shape"]), tuple(public["groups"]), tuple(public["classes"]))
        return Generator(make_method(setting), server_state(checkpoint), setting.groups, setting.classes)

    def sample(self, count: int, *, group: str, label: str = "", seed: int = 0) -> Tensor:
        """Records of a group from the newest checkpoint: images in [0, 1], or vectors; of one class, where named."""
        return self.generator().sample(count, group=group, label=label, seed=seed)

    def evaluation(
        self,
        *,
        settings: EvaluationConfig | None = None,
        round_number: int | None = None,
        device: str = "cpu",
        federation: Federation | None = None,
    ) -> tuple[Evaluator, Evaluation]:
        """What metrics look at after a round, by default the newest that was kept, from the run's own data.

        ``settings`` replace the run's own; ``federation`` is needed where the run was given one in memory.
        """
        config = self.config if settings is None else replace(self.config, evaluation=settings)
        checkpoint = load_checkpoint(self.folder.path, round_number)
        experiment = Experiment.of(config, federation)
        if checkpoint.facts.get("federation") != experiment.federation.digest:
            raise RunFolderError(f"{self.folder.path}: the data have changed since its checkpoints were made")
        evaluator = Evaluator(experiment.federation, config.evaluation, experiment.streams, torch_device(device))
        state = restored(checkpoint, experiment.federation)
        generator = Generator(
            experiment.method, state.server, experiment.federation.groups, experiment.federation.classes
        )
        rounds, egress = (
            [row for row in rows if row["round"] <= state.round]
            for rows in (self.folder.metrics(), self.folder.egress())
        )
        silos = KeptModels(state, experiment.federation)
        return evaluator, evaluator.evaluation(generator, silos, rounds, egress)

    def evaluate(
        self,
        *,
        settings: EvaluationConfig | None = None,
        round_number: int | None = None,
        device: str = "cpu",
        federation: Federation | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> dict[str, float]:
        """Measure a checkpoint and add what is found to evaluations.jsonl; ``progress`` hears of each metric."""
        evaluator, evaluation = self.evaluation(
            settings=settings, round_number=round_number, device=device, federation=federation
        )
        number = self.folder.rounds_done if round_number is None else round_number
        found: dict[str, float] = {}
        for name, values, seconds in evaluator.measure(evaluation):
            self.folder.record_evaluation(number, values, seconds)
            found |= values
            if progress is not None:
                progress(name, seconds)
        return found


def train(
    config: Config, out: Path | str, federation: Federation | None = None, observer: Observer | None = None
) -> Run:
    """Run an experiment into a new folder."""
    return Experiment.of(config, federation).run(out, observer)


def resume(
    out: Path | str,
    federation: Federation | None = None,
    observer: Observer | None = None,
    engine: Mapping[str, str] | None = None,
) -> Run:
    """Go on with a run from its newest checkpoint; ``engine`` changes settings of that section, such as the device."""
    folder = RunFolder.open(Path(out))
    config = folder.config
    if engine:
        config = replace(config, engine=parse(EngineConfig, asdict(config.engine) | dict(engine), "engine"))
    return Experiment.of(config, federation).resume(folder, observer)


def load(out: Path | str) -> Run:
    """Find a finished or unfinished run again."""
    return Run(RunFolder.open(Path(out)))
