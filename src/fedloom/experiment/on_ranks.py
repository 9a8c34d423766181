"""A run on several ranks: they make sure that all have the same before it, then rank 0 leads and the others follow."""

from __future__ import annotations

import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedloom
from fedloom.config import Config
from fedloom.engines.choice import device_of, make_engine
from fedloom.engines.flower.frames import Frame
from fedloom.engines.pieces import Divisible
from fedloom.engines.ranked import END, FAILED, RankedEngine, follow
from fedloom.engines.ranks import LEADER, Ranks, place
from fedloom.errors import ConfigError, FedloomError
from fedloom.experiment.experiment import Experiment
from fedloom.runs.stacks import Overflow
from fedloom.settings import parse

HERE, EXPERIMENT, READY, ENGINE = "here", "experiment", "ready", "engine"


class Leader:
    """Rank 0, before and beside a run."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._others = range(1, ranks.size)

    def muster(self, config: Config) -> None:
        """Make sure that every rank was given the same; it reads its data meanwhile."""
        for rank in self._others:
            there = self._heard(rank).header
            if there["version"] != fedloom.__version__:
                raise FedloomError(
                    f"rank {rank} runs fedloom {there['version']}, and rank 0 {fedloom.__version__}; install one "
                    "version everywhere"
                )
            given = there["config"]
            if given is not None and (differs := _difference(tomllib.loads(config.to_toml()), tomllib.loads(given))):
                raise ConfigError(f"rank {rank} was given another configuration than rank 0: {differs}")
        for rank in self._others:
            self._ranks.tell(rank, Frame({"kind": EXPERIMENT, "config": config.to_toml()}))
        self._place(config)

    def check_data(self, experiment: Experiment) -> None:
        """Make sure that every rank has read the same records."""
        digest = (experiment.sought or experiment.federation).digest
        for rank in self._others:
            if self._heard(rank).header["data"] != digest:
                raise FedloomError(f"rank {rank} has read other records than rank 0; give every machine the same data")

    def engine(self, engine: Divisible, groups: Mapping[str, str] | None) -> RankedEngine:
        """One whose silos train on all ranks, which are told what it has chosen and what groups were found."""
        for rank in self._others:
            found = dict(groups) if groups is not None else None
            self._ranks.tell(rank, Frame({"kind": ENGINE, "choice": engine.choice(), "groups": found}))
        return RankedEngine(engine, self._ranks)

    @staticmethod
    def _place(config: Config) -> None:
        if device_of(config.engine).type == "cuda":
            place()

    def _heard(self, rank: int) -> Frame:
        frame = self._ranks.hear(rank)
        if frame.kind == FAILED:
            raise FedloomError(f"rank {rank}: {frame.header['reason']}")
        return frame


def follow_leader(ranks: Ranks, config: Config | None) -> None:
    """All that another rank than 0 does; ``config`` is what it was given itself, to be compared."""
    given = None if config is None else config.to_toml()
    ranks.tell(LEADER, Frame({"kind": HERE, "version": fedloom.__version__, "config": given}))
    if (frame := ranks.hear(LEADER)).kind == END:
        return
    try:
        config = parse(Config, tomllib.loads(frame.header["config"]))
        if device_of(config.engine).type == "cuda":
            place()
        experiment = Experiment.of(config)
    except FedloomError as error:
        ranks.tell(LEADER, Frame({"kind": FAILED, "reason": str(error)}))
        return
    digest = (experiment.sought or experiment.federation).digest
    ranks.tell(LEADER, Frame({"kind": READY, "data": digest}))
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
