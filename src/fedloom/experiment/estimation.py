"""How long a run would take, and how much memory: found by a few steps that are kept nowhere."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from fedloom.config import Config
from fedloom.engines.base import FederationState, Job, initial_state
from fedloom.engines.choice import make_engine
from fedloom.engines.fused_stack import members_of
from fedloom.engines.training import Trainer
from fedloom.experiment.experiment import Experiment
from fedloom.federation.building import check_dealt
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.sharing.plan import Tensors

FEW, MORE = 3, 9  # steps of a silo in the two rounds that are compared


@dataclass(frozen=True)
class RunEstimate:
    """What a run would take on this machine."""

    engine: str
    silos: int
    records: int  # of the silos together
    parameters: int  # that the server holds
    rounds: int
    steps_per_round: int  # of all silos together
    seconds_per_round: float  # of training; what measures the run comes on top
    memory: int  # bytes at most: of the GPU where it trains there, else of the process
    bytes_per_checkpoint: int
    tried_steps: int  # that this was found by

    @property
    def seconds(self) -> float:
        """Of all rounds."""
        return self.rounds * self.seconds_per_round


def estimate(config: Config, federation: Federation | None = None) -> RunEstimate:
    """Say how long :func:`fedloom.train` would take, by trying a round with few steps and one with more.

    Nothing is written, charged or released.
    """
    experiment = Experiment.of(config, federation)
    check_dealt(experiment.federation)
    federation, trainer = experiment.federation, experiment.trainer
    trainer.check_privacy()
    rounds = experiment.config.rounds
    whole = sum(len(trainer.attended[silo]) * trainer.steps(silo) for silo in members_of(trainer)) / rounds
    if not experiment.method.phases:
        whole = 0
    context = _first_attended(experiment)
    chosen = make_engine(trainer)
    choice = chosen.choice()
    chosen.close()
    if on_gpu := choice.get("device") == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tried: list[tuple[int, float]] = []
    state = initial_state(experiment.method, federation, experiment.config)
    for steps in (FEW, FEW, MORE):  # the first warms up
        engine = make_engine(_shortened(trainer, steps), choice)
        try:
            start = time.perf_counter()
            after, report = engine.round(Job(state, context, lambda _: None))
            tried.append((report.steps, time.perf_counter() - start))
        finally:
            engine.close()
    return RunEstimate(
        engine=chosen.describe(),
        silos=len(federation),
        records=federation.held,
        parameters=sum(tensor.numel() for block in after.server.blocks.values() for tensor in block.values()),
        rounds=rounds,
        steps_per_round=round(whole),
        seconds_per_round=_extended(tried[1], tried[2], whole),
        memory=torch.cuda.max_memory_allocated() if on_gpu else _resident(),
        bytes_per_checkpoint=_bytes(after, len(federation)),
        tried_steps=sum(steps for steps, _ in tried),
    )


def _shortened(trainer: Trainer, steps: int) -> Trainer:
    """The same with few steps a round, under noise from the seed: what comes of it is thrown away."""
    config = trainer.config
    local, privacy = replace(config.local, steps=steps), replace(config.privacy, noise="test", pretraining=0)
    return replace(trainer, config=replace(config, local=local, privacy=privacy))


def _first_attended(experiment: Experiment) -> RoundContext:
    """The first round that anybody takes part in."""
    contexts = (experiment.context(number) for number in range(1, experiment.config.rounds + 1))
    return next((context for context in contexts if context.participants), experiment.context(1))


def _extended(few: tuple[int, float], more: tuple[int, float], whole: float) -> float:
    """Seconds of a round of ``whole`` steps, by steps and seconds of two others."""
    if more[0] == few[0]:  # nothing is trained step by step
        return more[1]
    per_step = max(0.0, (more[1] - few[1]) / (more[0] - few[0]))
    return max(few[1] - per_step * few[0], 0.0) + per_step * whole


def _resident() -> int:
    """The most that this process has held, as far as the system says."""
    try:
        import resource
    except ImportError:  # no Unix
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _bytes(state: FederationState, silos: int) -> int:
    """Of a checkpoint in which every silo keeps as much as those that took part."""
    kept = [_sum(each.tensors) for each in state.silos.values()]
    per_silo = sum(kept) / len(kept) if kept else 0.0
    return round(sum(map(_sum, state.server.blocks.values())) + silos * per_silo)


def _sum(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
