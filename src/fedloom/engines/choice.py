"""Which engine, and how: as asked for, else by rules on the configuration and the machine alone, never on a clock.

So the same experiment with the same seed has the same bits on every machine of a type. Each rule's measurement is in
docs/engines.md.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedloom.config import EngineConfig
from fedloom.engines.fused import CUDA_CHUNK, FusedEngine, FusedOptions
from fedloom.engines.fused_layers import has_convolutions
from fedloom.engines.fused_slots import FIXED, fillable
from fedloom.engines.fused_stack import Stack, kinds_of, members_of, stacks_of
from fedloom.engines.fused_support import UnsupportedError, tried
from fedloom.engines.pieces import Divisible
from fedloom.engines.ranks import ranks_here
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, FedloomError, FedloomWarning

CPU_CHUNK = 10  # silos at once on a CPU
SMALL = 150_000  # parameters of a model of which so many silos stay in a CPU's cache, with their moments
WORTH_BATCHING = 13_000  # steps of single silos on a CPU, below which the fused engine's start is not earned back
STACK_IN_WORKERS = 3  # a stack on one core is as fast as so many workers
WORKER_THREADS = 4  # more would wait for each other, since a quarter of a step is Python's
WORTH_A_THREAD = 2**23  # parameters times rows of a batch: what a step computes while another thread has Python
LANES = 8  # in which the silos of large convolutional networks train on a GPU; 4 are nearly as fast
TURNS = 2  # of each lane in a recording: for every number of silos there is one, of so many times its launches
WORTH_LANES = 4_000_000  # parameters of such a network
WORTH_COMPILING_A_LANE = 40_000  # steps of single silos that earn a compilation back
WORTH_COMPILING = {True: 1e6, False: 1.5e7}  # slots worked on in all steps: with convolutions, and without
COPIES = 8  # of a silo's weights: themselves, gradients, moments, what was received, and room to work
MEMORY_SHARE = 0.5  # of the device's
UNKNOWN: Mapping[str, Any] = {}


def make_engine(trainer: Trainer, earlier: Mapping[str, Any] = UNKNOWN) -> Divisible:
    """The engine that the configuration asks for.

    ``earlier`` is the choice of the run that is resumed: what is left open is taken from there, because another choice,
    on another machine, may change the last bit.
    """
    wanted = trainer.config.engine
    device = device_of(wanted)
    same_device = earlier.get("device") == device.type
    if not trainer.method.phases:  # nothing to batch
        return _reference(trainer, 1)
    threads = earlier.get("threads", 1)
    name = str(earlier["name"]) if wanted.name == "auto" and same_device else wanted.name
    if name == "reference" or (name == "auto" and device.type == "cpu" and not _worth_batching(trainer)):
        return _reference(trainer, threads)
    try:
        return _fused((trainer,), device, earlier)
    except UnsupportedError as error:
        if name == "fused" or device.type != "cpu":  # "auto" has promised nothing on a CPU
            warnings.warn(f"{error}; the reference engine takes over", FedloomWarning, stacklevel=2)
        return _reference(trainer, threads)


def make_pack(trainers: Sequence[Trainer], earlier: Mapping[str, Any] = UNKNOWN) -> FusedEngine:
    """One fused engine for several runs; ``earlier`` is the old choice of the first of them."""
    return _fused(trainers, device_of(trainers[0].config.engine), earlier)


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


def silos_per_round(trainer: Trainer) -> int:
    """How many silos are expected to take part in a round."""
    return max(1, round(trainer.config.participation.rate * len(trainer.federation)))


def _steps(trainer: Trainer) -> float:
    """Of a silo in the whole run, on average, each of all phases."""
    members = members_of(trainer)
    steps = sum(map(trainer.steps, members)) / max(1, len(members))
    return trainer.config.rounds * steps * len(trainer.method.phases)


def _reference(trainer: Trainer, threads: int) -> ReferenceEngine:
    """Worker threads where steps are heavy; they change no bit. Processes, and threads within a step, if asked for."""
    wanted = trainer.config.engine
    if wanted.workers:
        return ReferenceEngine(trainer, wanted.workers, wanted.threads or threads)
    crew = min(max(1, _cores() // ranks_here()), silos_per_round(trainer), WORKER_THREADS)
    heavy = max(map(_parameters, _models(trainer)), default=0) * trainer.config.local.batch_size >= WORTH_A_THREAD
    if crew == 1 or not heavy or (wanted.threads or threads) > 1:
        return ReferenceEngine(trainer, 1, wanted.threads or threads)
    return ReferenceEngine(trainer, crew, kind="thread")


def _worth_batching(trainer: Trainer) -> bool:
    """Whether a stack on a CPU is faster than the plain loop; who sets workers or threads has the loop in mind."""
    wanted, silos, models = trainer.config.engine, silos_per_round(trainer), _models(trainer)
    return (
        not (wanted.workers or wanted.threads)
        and silos > 1
        and min(_cores(), silos) <= STACK_IN_WORKERS
        and max(map(_parameters, models)) <= SMALL
        and not any(map(has_convolutions, models))
        and _steps(trainer) * silos >= WORTH_BATCHING
    )


def _fused(trainers: Sequence[Trainer], device: torch.device, earlier: Mapping[str, Any]) -> FusedEngine:
    stacks, precision = stacks_of(trainers, device), trainers[0].config.engine.precision
    if earlier.get("name") == "fused" and earlier.get("device") == device.type:
        chunk, products, compiled = earlier["chunk"], earlier["matrix_convolutions"], earlier["compiled"]
        lanes = earlier.get("lanes", 0)
    elif device.type == "cpu":
        chunk, products, compiled, lanes = CPU_CHUNK, True, False, 0
    else:
        lanes = LANES if worth_lanes(stacks) else 0
        compiled = worth_compiling_a_lane(trainers, stacks) if lanes else worth_compiling(trainers, stacks)
        # Compiled, the copies around matrix products disappear, so that they are the faster convolutions.
        chunk, products = fitting(stacks, device), compiled or precision == "tf32"
        chunk = min(chunk, TURNS * lanes) if lanes else chunk
    options = FusedOptions(device, precision, chunk, products, compiled, lanes)
    return FusedEngine(trainers[0], options, stacks, trainers[1:])


def fitting(stacks: Sequence[Stack], device: torch.device) -> int:
    """How many silos train at once on a GPU, by the memory that it has in all; what else lies there is not known."""
    memory = MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
    largest = max(sum(tensor.nbytes for tensor in stack.model.state_dict().values()) for stack in stacks)
    return max(1, min(CUDA_CHUNK, int(memory / (COPIES * max(1, largest)))))


def worth_lanes(stacks: Sequence[Stack]) -> bool:
    """Whether silos are better trained one by one, several side by side: large convolutional networks without DP."""
    return all(
        stack.kind.privacy is None and has_convolutions(stack.model) and _parameters(stack.model) >= WORTH_LANES
        for stack in stacks
    )


def worth_compiling_a_lane(trainers: Sequence[Trainer], stacks: Sequence[Stack]) -> bool:
    """Whether the steps of single silos are so many that one that is compiled, once for all silos, pays."""
    steps = sum(_steps(trainer) * silos_per_round(trainer) for trainer in trainers)
    return steps >= WORTH_COMPILING_A_LANE and not any(trial.looked_at for s in stacks for trial in tried(s, True))


def worth_compiling(trainers: Sequence[Trainer], stacks: Sequence[Stack]) -> bool:
    """Whether a GPU has so much to do that compiled steps earn their compilation back, and a single one does.

    It takes steps over all slots. Compiled convolutions are faster by far; other layers gain less than the slots
    without a silo cost, so there everybody must take part. Private steps were never compiled on a GPU. An objective
    that follows the rounds would be compiled anew in each.
    """
    convolutional = [has_convolutions(stack.model) for stack in stacks]
    silos, fixed = sum(map(silos_per_round, trainers)), FIXED[any(convolutional)]
    if _steps(trainers[0]) * (silos + fixed * math.ceil(silos / CUDA_CHUNK)) < WORTH_COMPILING[any(convolutional)]:
        return False
    everybody = all(each.config.participation.rate == 1.0 or len(each.federation) == 1 for each in trainers)
    return (
        (everybody or all(convolutional))
        and all(map(fillable, stacks))
        and not any(trial.looked_at for stack in stacks for trial in tried(stack))
    )


def _cores() -> int:
    return os.cpu_count() or 1


def _models(trainer: Trainer) -> list[nn.Module]:
    """One of each kind of silo."""
    return [silos[0][1] for _, silos in kinds_of(trainer)]


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
