"""A run on several ranks: they make sure that all have the same before it, then rank 0 leads and the others follow."""

from __future__ import annotations

import shutil
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fedloom
from fedloom.config import Config
from fedloom.engines.choice import device_of, make_engine
from fedloom.engines.fused import gpu_of
from fedloom.engines.pieces import Divisible
from fedloom.engines.ranked import END, FAILED, RankedEngine, dismiss, follow
from fedloom.engines.ranks import LEADER, LostRankError, Ranks, place, started_again
from fedloom.engines.remote.frames import Frame
from fedloom.errors import ConfigError, FedloomError
from fedloom.experiment.experiment import Experiment, Run, reopened
from fedloom.experiment.run_loop import Observer
from fedloom.runs.folder import RunFolder
from fedloom.runs.stacks import Overflow
from fedloom.settings import parse

HERE, EXPERIMENT, READY, ENGINE = "here", "experiment", "ready", "engine"


class Leader:
    """Rank 0, which alone writes the run's folder."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._others = range(1, ranks.size)

    def train(self, config: Config, out: Path, observer: Observer) -> Run:
        """A run into a new folder; ranks that were started again after a failure go on with it."""
        if started_again() and (out / "run.toml").is_file() and RunFolder.open(out).config.digest() == config.digest():
            return self.resume(out, observer)
        loop = self._experiment(config).begin(out, observer)
        return Run(loop.run_alone(fellows=self))

    def resume(
        self, out: Path, observer: Observer, engine: Mapping[str, str] | None = None, rounds: int | None = None
    ) -> Run:
        """Go on from the newest checkpoint, which knows nothing of ranks."""
        config, folder = reopened(out, None, engine, rounds)
        loop = self._experiment(config).take_up(folder, observer)
        return Run(loop.run_alone(fellows=self))

    def engine(self, engine: Divisible, groups: Mapping[str, str] | None) -> RankedEngine:
        """One whose silos train on all ranks, which are told what it has chosen and what groups were found."""
        found = None if groups is None else dict(groups)
        for rank in self._others:
            self._ranks.tell(rank, Frame({"kind": ENGINE, "choice": engine.choice(), "groups": found}))
        return RankedEngine(engine, self._ranks)

    def close(self) -> None:
        """Let the others go."""
        dismiss(self._ranks)

    def _experiment(self, config: Config) -> Experiment:
        """The experiment, of which every rank has the same version, settings and records."""
        for rank in self._others:
            self._check(rank, config, self._heard(rank).header)
        for rank in self._others:  # which now read their data, as this one does
            self._ranks.tell(rank, Frame({"kind": EXPERIMENT, "config": config.to_toml()}))
        experiment = _prepared(config)
        for rank in self._others:
            there = self._heard(rank).header
            if there["data"] != _digest(experiment):
                raise FedloomError(f"rank {rank} has read other records than rank 0; give every machine the same data")
            if there["device"] != (here := _device(config)):
                raise FedloomError(f"rank {rank} trains on {there['device']}, and rank 0 on {here}; give all the same")
        return experiment

    @staticmethod
    def _check(rank: int, config: Config, there: Mapping[str, Any]) -> None:
        if there["version"] != fedloom.__version__:
            raise FedloomError(
                f"rank {rank} runs fedloom {there['version']}, and rank 0 {fedloom.__version__}; install one version "
                "everywhere"
            )
        given = there["config"]
        if given is not None and (differs := _difference(tomllib.loads(config.to_toml()), tomllib.loads(given))):
            raise ConfigError(f"rank {rank} was given another configuration than rank 0: {differs}")

    def _heard(self, rank: int) -> Frame:
        frame = self._ranks.hear(rank)
        if frame.kind == FAILED:
            raise FedloomError(f"rank {rank}: {frame.header['reason']}")
        return frame


def follow_leader(ranks: Ranks, given: Callable[[], Config | None]) -> None:
    """All that another rank than 0 does; ``given`` is what it was told to run itself, to be compared."""
    try:
        told = given()
        text = None if told is None else told.to_toml()
        ranks.tell(LEADER, Frame({"kind": HERE, "version": fedloom.__version__, "config": text}))
        if (frame := ranks.hear(LEADER)).kind == END:
            return
        config = parse(Config, tomllib.loads(frame.header["config"]))
        experiment = _prepared(config)
    except LostRankError:
        raise
    except FedloomError as error:
        ranks.tell(LEADER, Frame({"kind": FAILED, "reason": str(error)}))
        return
    ranks.tell(LEADER, Frame({"kind": READY, "data": _digest(experiment), "device": _device(config)}))
    if (frame := ranks.hear(LEADER)).kind == END:
        return
    if frame.header["groups"] is not None:
        experiment = Experiment.of(config, experiment.sought, frame.header["groups"])
    scratch = Path(tempfile.mkdtemp(prefix="fedloom-rank-"))
    try:
        engine = make_engine(experiment.trainer, frame.header["choice"])
        follow(ranks, engine, Overflow(scratch / "overflow", int(config.engine.state_memory * 1e6)))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _prepared(config: Config) -> Experiment:
    """The experiment, on a device that this rank shares with no other."""
    if device_of(config.engine).type == "cuda":
        place()
    return Experiment.of(config)


def _device(config: Config) -> str:
    """What this rank trains on: other devices have other bits, and other noise."""
    device = device_of(config.engine)
    return gpu_of(device).get("gpu", device.type)


def _digest(experiment: Experiment) -> str:
    """Of the records, before any groups were found."""
    return (experiment.sought or experiment.federation).digest


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "") -> str:
    """The first setting that is not the same, with both values."""
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name), theirs.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if found := _difference(one, other, f"{path}{name}."):
                return found
        elif one != other:
            return f"{path}{name} is {other!r} there and {one!r} here"
    return ""
