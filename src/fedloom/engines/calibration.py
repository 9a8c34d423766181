"""How many threads and workers: measured at the start on the run's own work, because no rule of thumb holds."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace

from fedloom.engines.base import FederationState
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError
from fedloom.federation.rounds import RoundContext

TRIAL_STEPS = 12
WORTH_STARTING_WORKERS = 40.0  # seconds of work left, below which workers do not earn back their start
WORTH_CHANGING = 1.15  # a choice must beat the simpler one by this factor


def calibrated_engine(trainer: Trainer, state: FederationState) -> ReferenceEngine:
    """The fastest of: one worker with 1, 2, 4, ... threads; one single-thread worker per core."""
    wanted, cores = trainer.config.engine, os.cpu_count() or 1
    participants = silos_per_round(trainer)
    if wanted.workers > 1:
        return ReferenceEngine(trainer, wanted.workers, threads=1)
    if wanted.workers == 1 and wanted.threads:
        return ReferenceEngine(trainer, 1, wanted.threads)

    candidates = [wanted.threads] if wanted.threads else [n for n in (1, 2, 4, 8, 16) if n <= cores]
    alone, seconds = ReferenceEngine(trainer, 1, candidates[0]), float("inf")
    for threads in candidates:
        engine = ReferenceEngine(trainer, 1, threads)
        trial = seconds_per_step(engine, trainer, state, tasks=1)
        if trial * WORTH_CHANGING < seconds:
            alone, seconds = engine, trial
    if wanted.workers == 1 or wanted.threads > 1 or min(cores, participants) == 1:
        return ReferenceEngine(trainer, 1, alone.threads)

    if seconds * steps_left(trainer, state) > WORTH_STARTING_WORKERS:
        pool = ReferenceEngine(trainer, min(cores, participants))
        # Workers that cannot start (a method defined in a script, too little memory) are no reason to fail.
        with contextlib.suppress(FedloomError):
            if seconds_per_step(pool, trainer, state, tasks=pool.workers) * WORTH_CHANGING < seconds:
                return pool
        pool.close()
    return ReferenceEngine(trainer, 1, alone.threads)


def seconds_per_step(engine: ReferenceEngine, trainer: Trainer, state: FederationState, tasks: int) -> float:
    """Wall time per silo-step of a few steps at ``tasks`` silos; the first go warms up and does not count."""
    context = RoundContext(1, 1, tuple(range(min(tasks, len(trainer.federation)))))
    trial = [replace(task, step_limit=TRIAL_STEPS) for task in engine.tasks(state, context)]
    list(engine.train(trial))
    start = time.perf_counter()
    steps = sum(result.steps for result in engine.train(trial))
    return (time.perf_counter() - start) / steps


def silos_per_round(trainer: Trainer) -> int:
    """How many silos are expected to take part in a round."""
    return max(1, round(trainer.config.participation.rate * len(trainer.federation)))


def steps_left(trainer: Trainer, state: FederationState) -> float:
    """How many silo-steps are expected until the end of the run."""
    records = sum(map(len, trainer.federation.silos)) / len(trainer.federation)
    per_silo = records / trainer.config.local.batch_size * trainer.config.local.epochs
    return per_silo * silos_per_round(trainer) * (trainer.config.rounds - state.round)
