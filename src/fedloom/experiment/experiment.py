"""Data, method, engine and evaluation tied together, and the run that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from fedloom.config import Config, EngineConfig, EvaluationConfig
from fedloom.discovery.grouping import with_groups
from fedloom.engines.base import AskingEngine, Engine, check_merge, initial_state, participants_of
from fedloom.engines.charging import privacy_of_silos
from fedloom.engines.choice import device_of
from fedloom.engines.distributed import of_sums
from fedloom.engines.domain import check_domain
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, RunFolderError
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.judgement import judge
from fedloom.evaluation.metric import METRICS
from fedloom.evaluation.suite import Evaluator
from fedloom.experiment.discovering import check_scope, find, groups_of, to_be_found
from fedloom.experiment.extension import extend
from fedloom.experiment.origin import check_origin, check_records, origin_of
from fedloom.experiment.outlook import shown_metrics, shown_run
from fedloom.experiment.run_loop import Observer, RunLoop
from fedloom.experiment.states import KeptModels, restored, server_state
from fedloom.federation.building import build_federation, check_dealt
from fedloom.federation.canaries import with_canaries
from fedloom.federation.on_demand import check_config
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Method, Setting, make_method
from fedloom.methods.generator import Generator
from fedloom.runs.at_work import check_idle
from fedloom.runs.checkpoint import Checkpoint, load_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.runs.images import grid_of
from fedloom.runs.ledgers import ledger_complaint
from fedloom.runs.trackers import check_trackers
from fedloom.settings import parse
from fedloom.shown import Shown
from fedloom.streams import Streams


@dataclass(frozen=True)
class Experiment:
    """Data and method in place, ready to run."""

    config: Config
    federation: Federation
    method: Method
    sought: Federation | None = None  # the source's, while its groups are to be found: then all silos are in one

    @classmethod
    def of(
        cls, config: Config, federation: Federation | None = None, groups: Mapping[str, str] | None = None
    ) -> Experiment:
        """Prepare what the configuration asks for, on the federation given or the one that it describes.

        ``groups`` are those of the silos, where they were to be found and have been.
        """
        config = parse(Config, config.to_mapping())  # a tree made in Python passes the same checks as a file
        if config.local.updates == "matched" and config.data.layout == "federated":
            raise ConfigError(
                "local.updates = 'matched' is for data.layout = 'centralised': it matches a federated run"
            )
        if federation is None:
            federation = build_federation(config.data, Streams(config.seed))
        elif config.data.layout == "centralised" and not federation.on_demand:
            federation = federation.centralised()
        if federation.on_demand:
            check_config(config)
        source, federation = federation, with_canaries(federation, config.audit, Streams(config.seed))
        seeks = config.data.groups == "discover" and groups is None
        if seeks:
            federation = to_be_found(config, federation)
        elif groups is not None:
            federation = with_groups(federation, groups, Streams(config.seed))
        method = make_method(Setting.of(config, federation))
        if seeks:
            check_scope(method)
        if method.labelled:
            federation.require_labels(method.name)
        check_merge(method, federation)
        check_domain(method, federation)
        return cls(config, federation, method, source if seeks else None)

    @cached_property
    def streams(self) -> Streams:
        """The random streams."""
        return Streams(self.config.seed)

    @cached_property
    def trainer(self) -> Trainer:
        """What trains a silo, under the privacy that the configuration asks for."""
        if self.federation.is_remote:  # each silo plans for itself
            return Trainer(self.config, self.method, self.federation)
        numbers = range(1, self.config.rounds + 1) if self.config.privacy.mechanism != "none" else ()
        rounds = [self.context(number).participants for number in numbers]
        plans = privacy_of_silos(self.config, self.federation, self.method, rounds)
        shared = bool(plans) and self.config.privacy.trust == "distributed"
        return Trainer(self.config, of_sums(self.method) if shared else self.method, self.federation, plans)

    def run(self, out: Path | str, observer: Observer | None = None, engine: Engine | None = None) -> Run:
        """Train from the start into a new folder, on the engine given or the one that the configuration asks for."""
        return self._live(self.begin(out, observer, engine), engine)

    def resume(self, folder: RunFolder, observer: Observer | None = None, engine: Engine | None = None) -> Run:
        """Go on from the newest checkpoint, exactly as if nothing had happened."""
        return self._live(self.take_up(folder, observer, engine), engine)

    def _live(self, loop: RunLoop, engine: Engine | None) -> Run:
        if self.sought and isinstance(engine, AskingEngine):
            engine = engine.regrouped(loop.experiment.trainer)
        return Run(loop.run_alone(engine), self._given)

    @property
    def _given(self) -> Federation | None:
        """The federation, where settings alone would not lead to it again."""
        given = self.sought or self.federation
        return given if given.described is None else None

    def begin(self, out: Path | str, observer: Observer | None = None, engine: Engine | None = None) -> RunLoop:
        """A run before its first round, in a new folder; ``engine`` reaches silos that are elsewhere."""
        self.config.privacy.check_mechanism()
        check_dealt(self.federation)
        check_trackers(self.config)
        evaluator = self._evaluator()  # complains before the folder exists
        # Models are built before the folder exists, so that networks that do not fit the data leave nothing behind.
        state = initial_state(self.method, self.federation, self.config)
        self.trainer.check_privacy()
        folder = RunFolder.create(Path(out), self.config, origin_of(self.config, self.federation))
        if self.sought:
            return self._found(folder, engine).take_up(folder, observer)
        return RunLoop(self, folder, state, evaluator, observer or Observer())

    def take_up(self, folder: RunFolder, observer: Observer | None = None, engine: Engine | None = None) -> RunLoop:
        """A run as its newest checkpoint left it."""
        check_idle(folder.path)
        check_records(folder, self.federation)
        if self.sought:
            return self._found(folder, engine).take_up(folder, observer)
        evaluator = self._evaluator()
        state, facts = initial_state(self.method, self.federation, self.config), dict[str, Any]()
        if folder.rounds_done:
            checkpoint = load_checkpoint(folder.path)
            self._check_same_experiment(folder, checkpoint)
            state, facts = restored(checkpoint, self.federation), checkpoint.facts
        # Not only read: a charge that was cut off is ended by whoever goes on.
        if self.trainer.privacy and (complaint := ledger_complaint(folder, facts, read_only=False)):
            raise RunFolderError(f"{folder.path}: {complaint}")
        folder.rewind(state.round)
        return RunLoop(self, folder, state, evaluator, observer or Observer())

    def _found(self, folder: RunFolder, engine: Engine | None) -> Experiment:
        """The same with its groups: as they stand in the folder, or found now."""
        return Experiment.of(self.config, self.sought, find(self, folder, engine))

    def _evaluator(self) -> Evaluator:
        """What measures the run, on the device that trains it.

        A server without its silos' records has what it can be told by a public set, and by what they released.
        """
        settings = self.config.evaluation
        if self.federation.is_remote and not len(self.federation.test):
            known = (METRICS.get(name, "evaluation.metrics") for name in settings.metrics)
            settings = replace(settings, metrics=tuple(metric.name for metric in known if metric.released))
        return Evaluator(self.federation, settings, self.streams, device_of(self.config.engine))

    def context(self, number: int) -> RoundContext:
        """Who takes part in a round."""
        return RoundContext(number, self.config.rounds, participants_of(self.config, self.federation, number))

    def _check_same_experiment(self, folder: RunFolder, checkpoint: Checkpoint) -> None:
        if checkpoint.facts.get("config") not in {self.config.digest(), *folder.digests()}:
            raise RunFolderError(f"{folder.path}: run.toml is not the one that its checkpoints were made with")
        check_records(folder, self.federation, checkpoint)


def torch_device(name: str) -> torch.device:
    """A device by its name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device = '{name}' is not there: torch finds no such device on this machine") from error
    return device


@dataclass(frozen=True)
class Run:
    """A run folder, and what can be asked of it."""

    folder: RunFolder
    federation: Federation | None = field(default=None, repr=False, compare=False)  # where it was given one in memory

    def __str__(self) -> str:
        return str(shown_run(self.folder))

    def _repr_html_(self) -> str:
        """The same in a notebook, with samples."""
        return shown_run(self.folder)._repr_html_()

    def table(self) -> Shown:
        """The newest metrics in words, as text or in a notebook."""
        return shown_metrics(self.folder.latest_metrics())

    def grid(self, count: int = 64, *, group: str = "", label: str = "", seed: int = 0) -> Image.Image:
        """New samples of a group, the first one unless told, side by side as one picture."""
        generator = self.generator()
        x = generator.sample(count, group=group or generator.groups[0], label=label, seed=seed)
        return grid_of(x, kind=generator.kind)

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
        shape, groups, classes = (tuple(public[name]) for name in ("shape", "groups", "classes"))
        setting = Setting(self.config, shape, groups, classes, kind=public.get("modality", ""))
        return Generator(make_method(setting), server_state(checkpoint), groups, classes, setting.modality.name)

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
        federation = self.federation if federation is None else federation
        check_origin(self.folder, federation)
        config = self.config if settings is None else replace(self.config, evaluation=settings)
        checkpoint = load_checkpoint(self.folder.path, round_number)
        experiment = Experiment.of(config, federation, groups_of(self.folder))
        check_records(self.folder, experiment.federation, checkpoint)
        evaluator = Evaluator(experiment.federation, config.evaluation, experiment.streams, torch_device(device))
        state = restored(checkpoint, experiment.federation)
        generator = Generator(
            experiment.method,
            state.server,
            experiment.federation.groups,
            experiment.federation.classes,
            experiment.federation.modality.name,
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
        if number == self.folder.rounds_done:
            self.folder.record_judgement(judge(evaluation, number))
        return found


def train(
    config: Config, out: Path | str, federation: Federation | None = None, observer: Observer | None = None
) -> Run:
    """Run an experiment into a new folder; a notebook shows how it goes on."""
    from fedloom.experiment.inline import usual_observer  # which is built on this module

    return Experiment.of(config, federation).run(out, observer or usual_observer())


def resume(
    out: Path | str,
    federation: Federation | None = None,
    observer: Observer | None = None,
    engine: Mapping[str, str] | None = None,
    rounds: int | None = None,
) -> Run:
    """Go on with a run from its newest checkpoint; ``engine`` changes settings of that section, such as the device.

    With ``rounds`` a run without privacy mechanism is trained on until it has so many in all.
    """
    from fedloom.experiment.inline import usual_observer  # which is built on this module

    config, folder = reopened(out, federation, engine, rounds)
    return Experiment.of(config, federation).resume(folder, observer or usual_observer())


def reopened(
    out: Path | str, federation: Federation | None, engine: Mapping[str, str] | None, rounds: int | None
) -> tuple[Config, RunFolder]:
    """A run's folder to go on with, and the configuration that it goes on by."""
    folder = RunFolder.open(Path(out))
    check_idle(folder.path)
    check_origin(folder, federation)
    if rounds is not None:
        folder = extend(folder, rounds, federation)
    config = folder.config
    if engine:
        config = replace(config, engine=parse(EngineConfig, asdict(config.engine) | dict(engine), "engine"))
    return config, folder


def load(out: Path | str) -> Run:
    """Find a finished or unfinished run again."""
    return Run(RunFolder.open(Path(out)))
