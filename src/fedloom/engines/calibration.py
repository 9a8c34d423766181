"""How many threads and workers: measured at the start on the run's own work, because no rule of thumb holds."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fedloom.engines.base import FederationState
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError
from fedloom.federation.rounds import RoundContext

# On a GPU a round costs more beside its steps than 12 of them (trials in benchmarks/results/gan_step-cuda.json).
TRIAL_STEPS = {"cpu": 12, "cuda": 48}
WORTH_STARTING_PROCESSES = 40.0  # seconds of work left, below which they do not earn back their start
WORTH_CHANGING = 1.15  # a choice must beat the simpler one by this factor


def fastest_reference(trainer: Trainer, state: FederationState) -> tuple[ReferenceEngine, float]:
    """The fastest plain loop and its seconds per silo-step; infinite where the person left nothing to measure.

    Tried are: one thread; one worker for each core, as threads and in a long run as processes; and, where there are
    fewer silos than cores, several threads for one silo.
    """
    wanted, cores = trainer.config.engine, os.cpu_count() or 1
    crew = 1 if wanted.workers == 1 else min(cores, silos_per_round(trainer))
    if wanted.workers > 1:
        return ReferenceEngine(trainer, wanted.workers), float("inf")
    if wanted.workers == 1 and wanted.threads:
        return ReferenceEngine(trainer, 1, wanted.threads), float("inf")
    best = ReferenceEngine(trainer, 1, max(wanted.threads, 1))
    seconds = _reference_seconds(best, trainer, state)
    others = []
    if crew > 1 and best.threads == 1:
        others.append(ReferenceEngine(trainer, crew, kind="thread"))
        if seconds * steps_left(trainer, state) > WORTH_STARTING_PROCESSES:
            others.append(ReferenceEngine(trainer, crew, kind="process"))
    if crew < cores and not wanted.threads:
        others += [ReferenceEngine(trainer, 1, threads) for threads in (2, 4, 8, 16) if threads <= cores]
    for engine in others:
        trial = float("inf")
        # Workers that cannot start (a method defined in a script, too little memory) are no reason to fail.
        with contextlib.suppress(FedloomError):
            trial = _reference_seconds(engine, trainer, state)
        slower = engine
        if trial * WORTH_CHANGING < seconds:
            slower, best, seconds = best, engine, trial
        slower.close()
    return best, seconds


def _reference_seconds(engine: ReferenceEngine, trainer: Trainer, state: FederationState) -> float:
    silos = min(engine.workers, len(trainer.federation))
    tasks = engine.tasks(state, RoundContext(1, 1, tuple(range(silos))))

    def trial(limit: int) -> int:
        return sum(result.steps for result in engine.train([replace(task, step_limit=limit) for task in tasks]))

    return seconds_per_step(trial, trainer)


def seconds_per_step(trial: Callable[[int], int], trainer: Trainer, device: str = "cpu") -> float:
    """Wall time per silo-step of whole rounds, judged by ``trial``, which goes so many steps and says how many it did.

    What a round costs beside its steps (sending, loading) is found by two trials of different length: in a short one
    it would pass for a part of the steps. Each is done twice, and the faster counts: whatever else the machine does
    can only slow a trial down.
    """

    def timed(limit: int) -> tuple[float, int]:
        start = time.perf_counter()
        steps = trial(limit)
        return time.perf_counter() - start, steps

    timed(1)  # warms up
    (little, few), (much, many) = (min(timed(limit), timed(limit)) for limit in (1, 1 + TRIAL_STEPS[device]))
    step = (much - little) / (many - few) if many > few else 0.0
    if step <= 0:
        return much / many
    return step + max(little / few - step, 0.0) / steps_of_a_silo(trainer)


def steps_of_trials(silos: Sequence[int]) -> int:
    """How many silo-steps :func:`seconds_per_step` takes on a CPU, for trials of so many silos at once."""
    return (3 + 2 * (1 + TRIAL_STEPS["cpu"])) * sum(silos)


def silos_per_round(trainer: Trainer) -> int:
    """How many silos are expected to take part in a round."""
    return max(1, round(trainer.config.participation.rate * len(trainer.federation)))


def steps_of_a_silo(trainer: Trainer) -> float:
    """How many steps a silo takes in a round, on average."""
    records = sum(map(len, trainer.federation.silos)) / len(trainer.federation)
    return max(1.0, records / trainer.config.local.batch_size * trainer.config.local.epochs)


def steps_left(trainer: Trainer, state: FederationState) -> float:
    """How many silo-steps are expected until the end of the run."""
    return steps_of_a_silo(trainer) * silos_per_round(trainer) * (trainer.config.rounds - state.round)
