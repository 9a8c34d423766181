"""A server's distillation as any engine sees it: the local training of one more silo, whose records are synthetic."""

from __future__ import annotations

from dataclasses import replace

from fedloom.config import Config
from fedloom.engines.base import Result, SiloState
from fedloom.engines.local_state import MODEL
from fedloom.engines.training import Trainer
from fedloom.federation.records import Federation, Silo
from fedloom.federation.rounds import RoundContext
from fedloom.methods.steps import DistillationJob, Distilled
from fedloom.sharing.codec import placed, under

ALONE = (0,)  # the only silo of a distillation


def distillation_trainer(config: Config, distillation: DistillationJob) -> Trainer:
    """What trains the server's model."""
    silo = Silo("synthetic", distillation.records)
    federation = Federation("synthetic", (silo,), distillation.records, distillation.method.plan.groups)
    return Trainer(replace(config, seed=distillation.seed, local=distillation.local), distillation.method, federation)


def distillation_context(distillation: DistillationJob) -> RoundContext:
    """The round, with nobody else in it."""
    return replace(distillation.context, participants=ALONE)


def state_before(distillation: DistillationJob) -> SiloState:
    """What a silo would have kept."""
    return SiloState(placed(MODEL, distillation.weights) | distillation.moments)


def distilled(result: Result) -> Distilled:
    """What the server takes from it."""
    kept = result.state.tensors
    return Distilled(
        weights=under(MODEL, kept),
        moments={name: tensor for name, tensor in kept.items() if not name.startswith(MODEL)},
        terms={name.rpartition("/")[2]: value for name, value in result.terms.items()},
    )
