"""The loop of a run: all that happens around the engine's part of each round, alone or beside other runs."""

from __future__ import annotations

import time
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fedloom.engines.base import NO_SECRETS, Engine, FederationState, Job, Outcome, Result, RoundReport
from fedloom.engines.charging import Charging, noise_source
from fedloom.engines.choice import make_engine
from fedloom.engines.pieces import Divisible
from fedloom.errors import RunFolderError
from fedloom.evaluation.judgement import judge
from fedloom.evaluation.suite import Evaluator
from fedloom.experiment.discovering import groups_of
from fedloom.experiment.memory import most_memory
from fedloom.experiment.states import KeptModels, checkpoint_of
from fedloom.federation.rounds import RoundContext
from fedloom.methods.generator import Generator
from fedloom.runs.at_work import at_work
from fedloom.runs.checkpoint import save_checkpoint
from fedloom.runs.files import file_name
from fedloom.runs.folder import RunFolder
from fedloom.runs.health import ailment
from fedloom.runs.images import save_shown
from fedloom.runs.ledgers import LEDGER
from fedloom.runs.stacks import Overflow
from fedloom.runs.trackers import Tracker, open_trackers
from fedloom.sharing.update import DivergedError

if TYPE_CHECKING:
    from fedloom.experiment.experiment import Experiment

GRID = 64  # images in a sample grid
MEMORY = "memory"  # the most that was held, in environment.json
Rounds = typing.Generator[
    Job, tuple[FederationState, RoundReport, float], None
]  # asked for; given, with seconds of training


class Observer:
    """Hears how a run goes on; this one does nothing with it."""

    def started(self, experiment: Experiment, engine: Engine, rounds_done: int) -> None:
        """The engine is ready."""

    def silo_done(self, context: RoundContext, result: Result) -> None:
        """A silo finished its part of a round."""

    def round_done(self, report: RoundReport, metrics: dict[str, float]) -> None:
        """A round is over and on disk."""


class FellowRanks(Protocol):
    """Other ranks that train a run's silos, as whoever leads them knows them."""

    def engine(self, engine: Divisible, groups: Mapping[str, str] | None, /) -> Engine:
        """The leader's, whose silos train on all ranks; groups are those that were found, where they were."""
        ...


@dataclass(frozen=True)
class RunLoop:
    """A run from where it stands to its end."""

    experiment: Experiment
    folder: RunFolder
    state: FederationState
    evaluator: Evaluator
    observer: Observer

    def run_alone(self, given: Engine | None = None, fellows: FellowRanks | None = None) -> RunFolder:
        """Live with an engine of its own, the one given or the one that the configuration asks for, into its folder.

        Where there are ``fellows``, that engine is their leader's.
        """
        if self.folder.status["state"] == "unfinished":
            engine = given or self._made(fellows)
            try:
                failures = run_together([self], engine, lambda jobs: {0: _attempted(engine, jobs[0])})
            finally:
                engine.close()
            if failures:
                raise failures[0]
        return self.folder

    def _made(self, fellows: FellowRanks | None) -> Engine:
        engine = make_engine(self.experiment.trainer, self.earlier_choice)
        return engine if fellows is None else fellows.engine(engine, groups_of(self.folder))

    @property
    def earlier_choice(self) -> dict[str, Any]:
        """What the engine chose before the run was stopped: other choices may change the last bit."""
        choice: dict[str, Any] = self.folder.environment.get("engine_choice", {})
        return choice

    def rounds(self, engine: Engine) -> Rounds:
        """Asks for one round after the other, and is told what came of it; nobody else may be at work meanwhile."""
        with at_work(self.folder.path):
            yield from self._rounds(engine)

    def _rounds(self, engine: Engine) -> Rounds:
        experiment, folder, state = self.experiment, self.folder, self.state
        config, trainer, observer = experiment.config, experiment.trainer, self.observer
        folder.keep_coins({found.silo: found.included.tolist() for found in experiment.federation.canaries})
        trackers = open_trackers(config, folder.path, state.round)
        charging = Charging(trainer, folder.ledger, self._secret()) if trainer.privacy else None
        overflow = Overflow(folder.overflow, int(config.engine.state_memory * 1e6))
        noted = self._note(engine, charging)
        try:
            for kept in state.silos.values():
                overflow.admit(kept)
            observer.started(experiment, engine, state.round)
            while state.round < config.rounds:
                start = time.perf_counter()
                context, secrets = experiment.context(state.round + 1), NO_SECRETS
                if charging is not None:
                    context, secrets = charging.admitted(state, context, noise_source(engine.choice()))
                before = time.perf_counter() - start
                on_silo = partial(_silo_done, overflow, observer, context)
                state, report, training = yield Job(state, context, on_silo, secrets)
                changed = engine.choice() != noted
                if changed:  # memory ran out: known before anything of this round is, for who resumes
                    noted = self._note(engine, charging)
                # Other runs' work in between is not counted.
                metrics = self._logged(state, report, charging, trackers, before + training)
                if reason := ailment(folder.metrics(), config.rounds):
                    folder.end("diverged", state.round, reason)
                    return
                if changed or self._is_due(state.round):  # rounds up to a change would not be done again as they were
                    self._keep(state, report, charging)
                observer.round_done(report, metrics)
            folder.note({MEMORY: most_memory(noted.get("device", "cpu"))})
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

    def _logged(
        self,
        state: FederationState,
        report: RoundReport,
        charging: Charging | None,
        trackers: Sequence[Tracker],
        spent: float,
    ) -> dict[str, float]:
        """Measure a round that took so many seconds, and log it; returns its metrics."""
        start = time.perf_counter() - spent
        row, egress = _row(report), [record.to_mapping() for record in report.egress]
        row["seconds"] = time.perf_counter() - start
        if charging is not None:
            row |= charging.metrics()
        metrics = self._evaluate(state, row, egress)
        row["seconds"] = time.perf_counter() - start
        self.folder.record_round(row | metrics, egress)
        for tracker in trackers:
            tracker.record(state.round, row | metrics)
        return metrics

    def _is_due(self, round: int) -> bool:
        """Whether a round is one of those that are kept."""
        config = self.experiment.config
        return round % config.engine.checkpoint_every == 0 or round == config.rounds

    def _keep(self, state: FederationState, report: RoundReport, charging: Charging | None) -> None:
        """A checkpoint, with how far the ledger has come."""
        config, chosen = self.experiment.config, report.context.participants
        charges = charging.chain() if charging is not None else None
        made = checkpoint_of(config, self.experiment.federation, state, chosen, charges)
        save_checkpoint(self.folder.path, made, config.engine.keep_checkpoints)

    def _secret(self) -> bytes | None:
        """Of the run's noise; None where it is to come from the seed."""
        return None if self.experiment.config.privacy.noise == "test" else self.folder.secret()

    def _note(self, engine: Engine, charging: Charging | None) -> dict[str, Any]:
        """Write down what the engine has chosen, and which ledger will be charged: before it is."""
        choice = engine.choice()
        facts = {"engine": engine.describe(), "engine_choice": choice}
        self.folder.note(facts | ({LEDGER: charging.chain().ledger} if charging is not None else {}))
        return choice

    def _evaluate(self, state: FederationState, row: dict[str, Any], egress: list[dict[str, Any]]) -> dict[str, float]:
        """Metrics and sample grids, when they are due; this round's log lines are not yet in the folder."""
        config, federation, folder = self.experiment.config, self.experiment.federation, self.folder
        every = config.evaluation.every
        if state.round != config.rounds and (every == 0 or state.round % every):
            return {}
        kind = federation.modality.name
        generator = Generator(self.experiment.method, state.server, federation.groups, federation.classes, kind)
        if federation.modality.shows(federation.shape) and generator.pathways:
            samples = folder.samples_of(state.round)
            for group in federation.groups:
                way, device = generator.pathways[0], self.evaluator.device
                images = generator.sample(GRID, group=group, seed=config.seed, pathway=way, device=device)
                save_shown(images, samples / file_name(group), kind=kind)
        rounds, left = [*folder.metrics(), row], [*folder.egress(), *egress]
        evaluation = self.evaluator.evaluation(generator, KeptModels(state, federation), rounds, left)
        metrics = self.evaluator.values(evaluation)
        if state.round == config.rounds:
            folder.record_judgement(judge(evaluation, state.round))
        return metrics


def run_together(
    loops: Sequence[RunLoop], engine: Engine, carry_out: Callable[[Mapping[int, Job]], Mapping[int, Outcome]]
) -> dict[int, Exception]:
    """Live through the rounds of runs that share an engine; returns what went wrong, and in which of them.

    Those furthest behind go first, so that runs that were stopped in different rounds soon go on together.
    """
    failures: dict[int, Exception] = {}
    everyone = [loop.rounds(engine) for loop in loops]

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
        jobs = {run: job for number in range(len(loops)) for run, job in asked(number, None).items()}
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


def _row(report: RoundReport) -> dict[str, Any]:
    """What metrics.jsonl says of a round beside its metrics."""
    context = report.context
    row = {"round": context.round, "seconds": 0.0, "participants": context.participants, "steps": report.steps}
    return row | {f"train/{name}": value for name, value in report.terms.items()}


def _attempted(engine: Engine, job: Job) -> Outcome:
    try:
        return engine.round(job)
    except Exception as error:
        return error


def _silo_done(overflow: Overflow, observer: Observer, context: RoundContext, result: Result) -> None:
    observer.silo_done(context, result)
    overflow.admit(result.state)
