"""How long a run would take, how much memory and how many bytes: found by a few steps that are kept nowhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedloom.config import Config
from fedloom.engines.base import FederationState, Job, RoundReport, initial_state, site_of
from fedloom.engines.choice import make_engine
from fedloom.engines.fused_layers import has_convolutions
from fedloom.engines.fused_records import size_of
from fedloom.engines.fused_stack import members_of
from fedloom.engines.training import Trainer
from fedloom.evaluation.cost import bytes_down, parameters
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.memory import most_memory
from fedloom.federation.building import check_dealt
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext, Site
from fedloom.sharing.plan import Tensors
from fedloom.sharing.update import EgressRecord

NUMBER = 4  # bytes
FEW, MORE = 3, 9  # steps of a silo in the two rounds that are compared


@dataclass(frozen=True)
class RunEstimate:
    """What a run would take on this machine."""

    engine: str
    silos: int
    records: int  # of the silos together
    parameters: int  # that the server holds
    rounds: int
    silos_per_round: int  # on average
    steps_per_round: int  # of all silos together
    seconds_per_round: float  # of training; what measures the run comes on top
    seconds_beside_steps: float  # of those
    bytes_up: int  # that leave the silos in the whole run
    bytes_down: int
    parameters_of_a_silo: int  # of the largest
    bytes_of_a_silo: int  # its records, on average
    convolutions: bool  # whether its networks have some
    chunk: int  # silos that train at once, where it trains on a GPU
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
    members = members_of(trainer)
    whole = sum(len(trainer.attended[silo]) * trainer.steps(silo) for silo in members) / rounds
    if not experiment.method.phases:
        whole = 0
    context = _first_attended(experiment)
    chosen = make_engine(trainer)
    choice = chosen.choice()
    chosen.close()
    if on_gpu := choice.get("device") == "cuda":
        torch.cuda.reset_peak_memory_stats()
    state = initial_state(experiment.method, federation, experiment.config)
    after, report, tried = _tried(trainer, choice, state, context)
    sites = [site_of(federation, numbers[0]) for numbers in federation.alike.values()]
    return RunEstimate(
        engine=chosen.describe(),
        silos=len(federation),
        records=federation.held,
        parameters=sum(tensor.numel() for block in after.server.blocks.values() for tensor in block.values()),
        rounds=rounds,
        silos_per_round=round(sum(len(trainer.attended[silo]) for silo in members) / rounds),
        steps_per_round=round(whole),
        seconds_per_round=_extended(tried[1], tried[2], whole),
        seconds_beside_steps=_extended(tried[1], tried[2], 0),
        bytes_up=_bytes_up(trainer, report.egress),
        bytes_down=_bytes_down(trainer, state, sites),
        parameters_of_a_silo=max(parameters(experiment.method, site) for site in sites),
        bytes_of_a_silo=size_of([federation.silos[silo] for silo in context.participants])
        // max(1, len(context.participants)),
        convolutions=any(has_convolutions(experiment.method.build(site)) for site in sites),
        chunk=choice.get("chunk", 0) if on_gpu else 0,
        memory=most_memory(choice.get("device", "cpu")),
        bytes_per_checkpoint=_bytes(after, len(members)),
        tried_steps=sum(steps for steps, _ in tried),
    )


def _tried(
    trainer: Trainer, choice: dict[str, Any], state: FederationState, context: RoundContext
) -> tuple[FederationState, RoundReport, list[tuple[int, float]]]:
    """A round with few steps, that again, and with more: the last one's outcome, and steps and seconds of all."""
    tried: list[tuple[int, float]] = []
    for steps in (FEW, FEW, MORE):  # the first warms up
        engine = make_engine(_shortened(trainer, steps), choice)
        try:
            start = time.perf_counter()
            after, report = engine.round(Job(state, context, lambda _: None))
            tried.append((report.steps, time.perf_counter() - start))
        finally:
            engine.close()
    return after, report, tried


def _bytes_up(trainer: Trainer, egress: Sequence[EgressRecord]) -> int:
    """What leaves the silos in all rounds, from what left them in one; payloads have rounds of their own."""
    rules = {rule.name: sum(map(math.prod, rule.payload.shapes.values())) for rule in trainer.method.payloads}
    numbers = trainer.federation.numbers_of([record.silo for record in egress])
    each = {}
    for record in egress:
        beside = sum(NUMBER * rules.get(payload, 0) for payload in record.payloads)
        each[trainer.federation.silos[numbers[record.silo]].groups] = record.bytes - beside
    usual, total = sum(each.values()) / max(1, len(each)), 0.0
    for silo in members_of(trainer):
        attended = trainer.attended[silo]
        total += len(attended) * each.get(trainer.federation.silos[silo].groups, usual)
        total += sum(NUMBER * rules[rule.name] * len(rule.rounds(attended)) for rule in trainer.method.payloads)
    return round(total)


def _bytes_down(trainer: Trainer, state: FederationState, sites: Sequence[Site]) -> int:
    """What silos are sent in all rounds."""
    federation, total = trainer.federation, 0
    sent = {site.groups: bytes_down(trainer.method, state.server, site) for site in sites}
    for silo in members_of(trainer):
        total += len(trainer.attended[silo]) * sent[federation.silos[silo].groups]
    return total


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


def _bytes(state: FederationState, silos: int) -> int:
    """Of a checkpoint in which every silo keeps as much as those that took part."""
    kept = [_sum(each.tensors) for each in state.silos.values()]
    per_silo = sum(kept) / len(kept) if kept else 0.0
    return round(sum(map(_sum, state.server.blocks.values())) + silos * per_silo)


def _sum(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
