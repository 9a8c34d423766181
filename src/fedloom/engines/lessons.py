"""A server's lesson as any engine sees it: the local training of one more silo, whose records are synthetic."""

from __future__ import annotations

from dataclasses import replace

from fedloom.config import Config
from fedloom.engines.base import Result, SiloState
from fedloom.engines.training import MODEL, Trainer
from fedloom.federation.records import Federation, Silo
from fedloom.federation.rounds import RoundContext
from fedloom.methods.steps import Lesson, Taught
from fedloom.sharing.codec import placed, under

ALONE = (0,)  # the only silo of a lesson


def lesson_trainer(config: Config, lesson: Lesson) -> Trainer:
    """What trains the server's model."""
    silo = Silo("synthetic", lesson.records)
    federation = Federation("synthetic", (silo,), lesson.records, lesson.method.plan.groups)
    return Trainer(replace(config, seed=lesson.seed, local=lesson.local), lesson.method, federation)


def lesson_context(lesson: Lesson) -> RoundContext:
    """The round, with nobody else in it."""
    return replace(lesson.context, participants=ALONE)


def state_before(lesson: Lesson) -> SiloState:
    """What a silo would have kept."""
    return SiloState(placed(MODEL, lesson.weights) | lesson.moments)


def taught(result: Result) -> Taught:
    """What the server takes from it."""
    kept = result.state.tensors
    return Taught(
        weights=under(MODEL, kept),
        moments={name: tensor for name, tensor in kept.items() if not name.startswith(MODEL)},
        terms={name.rpartition("/")[2]: value for name, value in result.terms.items()},
    )
