"""Which engine, and how: as asked for, else measured at the start on the run's own work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedloom.config import EngineConfig
from fedloom.engines.base import Engine, FederationState
from fedloom.engines.calibration import (
    WORTH_CHANGING,
    fastest_reference,
    seconds_per_step,
    silos_per_round,
    steps_left,
    steps_of_trials,
)
from fedloom.engines.fused import CUDA_CHUNK, FusedEngine, FusedOptions
from fedloom.engines.fused_stack import stacks_of
from fedloom.engines.fused_support import UnsupportedError
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, FedloomError, FedloomWarning
from fedloom.federation.rounds import RoundContext

WORTH_TRYING_FUSED = 20.0  # seconds of work left on a CPU, below which measuring would cost more than it could save
TRIAL_SHARE = 0.05  # of the steps left may go into trying the fused engine
WORTH_COMPILING = 240.0  # seconds of work left on a GPU, below which compilation is not earned back
CPU_CHUNKS = (1, 2, 5, 10)
UNKNOWN: Mapping[str, Any] = {}


def make_engine(trainer: Trainer, state: FederationState, earlier: Mapping[str, Any] = UNKNOWN) -> Engine:
    """The engine that the configuration asks for.

    ``earlier`` is the choice of the run that is resumed: what is still left open is taken from there, not measured
    again, because another choice may change the last bit.
    """
    wanted = trainer.config.engine
    device = device_of(wanted)
    name = wanted.name
    if not trainer.method.phases:  # nothing to batch, nothing to measure
        return ReferenceEngine(trainer, workers=max(wanted.workers, 1), threads=max(wanted.threads, 1))
    if name == "auto" and earlier.get("device") == device.type:
        name = earlier["name"]
    if name == "reference" and earlier.get("threads") and not wanted.threads:
        config = replace(trainer.config, engine=replace(wanted, threads=earlier["threads"]))
        trainer = replace(trainer, config=config)
    options = _earlier_options(wanted, device, earlier)
    if name == "fused" and options is not None:
        return _fused_or_reference(trainer, state, lambda: FusedEngine(trainer, options))
    return ENGINES[name](trainer, state, device)


def make_pack(
    trainers: Sequence[Trainer], states: Sequence[FederationState], earlier: Mapping[str, Any] = UNKNOWN
) -> FusedEngine:
    """One fused engine for several runs, batched as is best for the first of them; ``earlier`` is its old choice."""
    first, device = trainers[0], device_of(trainers[0].config.engine)
    options = _earlier_options(first.config.engine, device, earlier)
    if options is None:
        beside = sum(map(steps_left, trainers[1:], states[1:]))
        options = fastest_fused(first, states[0], device, beside)[0].options
    return FusedEngine(first, options, packed=trainers[1:])


def _earlier_options(wanted: EngineConfig, device: torch.device, earlier: Mapping[str, Any]) -> FusedOptions | None:
    if earlier.get("name") != "fused" or earlier["device"] != device.type:
        return None
    return FusedOptions(device, wanted.precision, earlier["chunk"], earlier["matrix_convolutions"], earlier["compiled"])


def device_of(wanted: EngineConfig) -> torch.device:
    """The device, checked against what there is and what the engine can do."""
    present = torch.cuda.is_available()
    if wanted.device == "cuda" and not present:
        raise FedloomError("engine.device = 'cuda', but no CUDA device can be used here; ask for 'cpu' or 'auto'")
    device = torch.device("cuda" if present and wanted.device != "cpu" and wanted.name != "reference" else "cpu")
    if wanted.name == "reference" and wanted.device == "cuda":
        raise ConfigError("engine.device = 'cuda' needs engine.name = 'fused' or 'auto'; 'reference' runs on the cpu")
    if wanted.precision != "float32" and wanted.name == "reference":
        raise ConfigError(
            f"engine.precision = '{wanted.precision}' needs engine.name = 'fused'; 'reference' is float32"
        )
    if wanted.precision != "float32" and device.type == "cpu":
        raise ConfigError(f"engine.precision = '{wanted.precision}' needs a CUDA device; on the cpu it is 'float32'")
    return device


def _reference(trainer: Trainer, state: FederationState, _: torch.device) -> Engine:
    return fastest_reference(trainer, state)[0]


def _fused(trainer: Trainer, state: FederationState, device: torch.device) -> Engine:
    return _fused_or_reference(trainer, state, lambda: fastest_fused(trainer, state, device)[0])


def _auto(trainer: Trainer, state: FederationState, device: torch.device) -> Engine:
    """On a GPU always fused; on a CPU whatever is faster, unless the person has set workers or threads."""
    if device.type == "cuda":
        return _fused(trainer, state, device)
    reference, seconds = fastest_reference(trainer, state)
    wanted, left = trainer.config.engine, steps_left(trainer, state)
    short = seconds * left < WORTH_TRYING_FUSED or steps_of_trials(_chunks(trainer)) > TRIAL_SHARE * left
    if wanted.workers or wanted.threads or short:
        return reference
    try:
        fused, fused_seconds = fastest_fused(trainer, state, device)
    except UnsupportedError:
        return reference
    if fused_seconds * WORTH_CHANGING < seconds:
        reference.close()
        return fused
    return reference


ENGINES: dict[str, Callable[[Trainer, FederationState, torch.device], Engine]] = {
    "auto": _auto,
    "reference": _reference,
    "fused": _fused,
}


def _fused_or_reference(trainer: Trainer, state: FederationState, make: Callable[[], Engine]) -> Engine:
    try:
        return make()
    except UnsupportedError as error:
        warnings.warn(f"{error}; the reference engine takes over", FedloomWarning, stacklevel=4)
        return fastest_reference(trainer, state)[0]


def fastest_fused(
    trainer: Trainer, state: FederationState, device: torch.device, beside: float = 0.0
) -> tuple[FusedEngine, float]:
    """The fastest way to batch the silos, and its seconds per silo-step.

    ``beside``: how many silo-steps other runs of the same pack have left, for which one compilation does as well.
    """
    precision = trainer.config.engine.precision
    stacks = stacks_of((trainer,), device)  # the records are brought to the device once for all that are tried
    if device.type == "cpu":
        every = [FusedOptions(device, precision, chunk) for chunk in _chunks(trainer)]
        candidates = [FusedEngine(trainer, options, stacks) for options in every]
    else:
        options = FusedOptions(device, precision, CUDA_CHUNK, matrix_convolutions=False)
        candidates = [FusedEngine(trainer, options, stacks)]
        if candidates[0].convolutions:
            candidates.append(FusedEngine(trainer, replace(options, matrix_convolutions=True), stacks))
    seconds = {engine: _fused_seconds(engine, trainer, state) for engine in candidates}
    best = min(candidates, key=lambda engine: seconds[engine])
    long = device.type == "cuda" and seconds[best] * (steps_left(trainer, state) + beside) > WORTH_COMPILING
    if long and _worth_filling(best, trainer):
        # Compiled, the copies around matrix products disappear, so that they are the faster convolutions.
        return FusedEngine(trainer, replace(options, matrix_convolutions=True, compiled=True), stacks), 0.0
    return best, seconds[best]


def _chunks(trainer: Trainer) -> list[int]:
    """How many silos at once are worth trying on a CPU."""
    return [chunk for chunk in CPU_CHUNKS if chunk <= silos_per_round(trainer)]


def _worth_filling(engine: FusedEngine, trainer: Trainer) -> bool:
    """Whether steps over all places, for which one compilation does, are faster than plain ones of the silos there.

    Compiled convolutions are, by far; other layers gain less than the places without a silo cost, so there everybody
    must take part. Private steps were never compiled on a GPU. An objective that follows the rounds would be compiled
    anew in each.
    """
    if (
        trainer.privacy
        or engine.follows_rounds
        or len({trainer.steps(silo) for silo in range(len(trainer.federation))}) > 1
    ):
        return False
    everybody = trainer.config.participation.rate == 1.0 or len(trainer.federation) == 1
    return everybody or engine.convolutional


def _fused_seconds(engine: FusedEngine, trainer: Trainer, state: FederationState) -> float:
    """Wall time per silo-step."""
    context = RoundContext(1, 1, tuple(range(min(silos_per_round(trainer), engine.chunk))))
    seconds = seconds_per_step(
        lambda limit: sum(r.steps for r in engine.train(state, context, step_limit=limit)),
        trainer,
        engine.options.device.type,
    )
    engine.close()
    return seconds
