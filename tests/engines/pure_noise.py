"""A method that does not learn, so that what silos send is noise and nothing else, on every path that there is.

Its losses have no gradient, its contributions are zeros, and its steps have length 1. What was sent is given in
standard deviations, as they follow from what the ledgers of the silos were charged for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.config import Config
from fedloom.engines.base import Job, Result, initial_state
from fedloom.engines.charging import Charging
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_noise import DeviceNoise
from fedloom.engines.fused_private import PrivateProgram
from fedloom.engines.local_state import BOUND
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.remote.silo import Grant, SiloService
from fedloom.engines.remote.work import Order, update_in
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment
from fedloom.federation.records import Batch, Federation
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, OptimizerRule, PayloadRule, Phase, Recipe, Setting
from fedloom.methods.steps import ServerStep
from fedloom.objectives.base import Losses, Step
from fedloom.privacy.accounting import Event, Gaussian
from fedloom.privacy.clipping import Quantile
from fedloom.privacy.ledger import PRETRAINING, UPDATE, Ledger
from fedloom.privacy.noise import keyed
from fedloom.privacy.payload_sums import BoundedSum
from fedloom.sharing.codec import packed
from fedloom.sharing.plan import GLOBAL, RECORD_COUNT, Payload, SharingPlan, Tensors
from fedloom.sharing.update import Update
from local_grid import remote
from support import federation_of, tiny_config

INPUTS, OUTPUTS = 6, 15_000
NUMBERS = (INPUTS + 1) * OUTPUTS  # of a block, and of a payload
BOUNDED, CLIP, BATCH, STEPS, ROUNDS = 0.5, 0.7, 8, 3, 2
CPU = torch.device("cpu")
FEDERATION = federation_of([0] * 16, [0] * 24)
SILOS, TOLERATED = 4, 1
PARTNERS = federation_of(*([0] * 16 for _ in range(SILOS)))


# What has no gradient, and what contributes nothing


class Pair(nn.Module):
    """Two blocks of zeros."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, outputs), nn.Linear(INPUTS, outputs)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


@dataclass(frozen=True)
class Flat:
    """Losses that a block takes part in and does not change."""

    block: str
    behind: bool  # the weight is also used beside its layer, so that gradients are written out

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        layer: nn.Linear = getattr(model, self.block)
        total = layer(step.batch.x).sum(1)
        return Losses(0.0 * (total + layer.weight.sum() if self.behind else total), {})


def nothing(model: nn.Module, batch: Batch) -> Tensors:
    return {"sum": torch.zeros(len(batch.x), NUMBERS)}


class Onlooker(ServerStep):
    """Learns nothing, so that every round begins with zeros, and has every silo's copy shown."""

    needs_each = True


@dataclass(frozen=True, kw_only=True)
class Options:
    phases: int = 2
    outputs: int = OUTPUTS
    behind: bool = False
    payloads: int = 0
    watched: bool = True  # whether the server is shown what single silos send


def make(setting: Setting, options: Options) -> Method:
    sums = [Payload(f"sum-{number}", "for a test", {"sum": (NUMBERS,)}) for number in range(options.payloads)]
    blocks = SharingPlan({"first": GLOBAL, "second": GLOBAL}, setting.groups, (RECORD_COUNT, *sums))

    def build(_: Site) -> nn.Module:
        return Pair(options.outputs)

    plan = OptimizerRule.of(setting.config.local)
    phases = [Phase(block, (block,), Flat(block, options.behind), plan) for block in ("first", "second")]
    return Method(
        "still",
        blocks.with_scopes(setting.config.sharing.scopes),
        build,
        tuple(phases[: options.phases]),
        Onlooker() if options.watched else ServerStep(),
        {},
        payloads=tuple(PayloadRule(each, BoundedSum(nothing, BOUNDED), "every") for each in sums),
    )


STILL = Recipe("still", "noise alone", Options, make)


def config_of(*overrides: str) -> Config:
    return tiny_config(
        "method.name=still",
        f"rounds={ROUNDS}",
        "local.optimizer=sgd",
        "local.learning_rate=1.0",
        f"local.batch_size={BATCH}",
        f"local.steps={STEPS}",
        "privacy.mechanism=dp-sgd",
        "privacy.noise_multiplier=1.5",
        "privacy.accountant=rdp",
        f"privacy.clip={CLIP}",
        *overrides,
    )


# What was charged, and what was sent

Sent = dict[tuple[str, int, str], Tensor]  # silo, round, block or payload -> the noise in standard deviations


def width_of(event: Event, phases: int) -> float:
    """Of the noise that a round's steps add up to in each of the phases that were charged together."""
    assert isinstance(event, Gaussian)
    return event.noise_multiplier * CLIP / BATCH * math.sqrt(event.steps / phases)


def standardised(updates: Sequence[Update], ledgers: Mapping[str, Path], phases: int) -> Sent:
    """Everything sent, by the widths that the ledgers of the silos were charged for."""
    found: Sent = {}
    for update in updates:
        ledger = Ledger(ledgers[update.silo], read_only=True)
        charged = {name: ledger.events(update.silo, name) for name in (UPDATE, PRETRAINING, *update.payloads)}
        ledger.close()
        for key in list(update.blocks)[:phases]:
            widths = [width_of(charged[UPDATE][update.round - 1], phases)]
            widths += [width_of(event, phases) for event in charged[PRETRAINING]]
            flat = torch.cat([tensor.flatten() for tensor in update.blocks[key].values()])
            found[update.silo, update.round, key.block] = flat.double() / math.hypot(*widths)
        for name, tensors in update.payloads.items():
            event = charged[name][update.round - 1]
            assert isinstance(event, Gaussian)
            flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
            found[update.silo, update.round, name] = flat.double() / (event.noise_multiplier * BOUNDED)
    return found


def lived(
    engine_of: Callable[[Trainer], ReferenceEngine | FusedEngine],
    path: Path,
    config: Config,
    federation: Federation = FEDERATION,
) -> Sent:
    """Rounds of a simulation, charged before they are carried out."""
    trainer = Experiment.of(config, federation).trainer
    engine, charging, updates = engine_of(trainer), Charging(trainer, path, os.urandom(32)), list[Update]()
    state = initial_state(trainer.method, federation, config)
    for number in range(1, config.rounds + 1):
        context, secrets = charging.admitted(state, RoundContext(number, config.rounds, tuple(range(len(federation)))))
        state, _ = engine.round(Job(state, context, lambda result: updates.append(result.update), secrets))
    charging.close()
    return standardised(updates, {silo.name: path for silo in federation.silos}, len(trainer.method.phases))


def fused(trainer: Trainer) -> FusedEngine:
    return FusedEngine(trainer, FusedOptions(CPU, chunk=1))


def plain(folder: Path, *overrides: str) -> Sent:
    return lived(ReferenceEngine, folder / "ledger.sqlite", config_of(*overrides))


def batched(folder: Path, *overrides: str) -> Sent:
    return lived(fused, folder / "ledger.sqlite", config_of(*overrides))


def as_on_a_gpu(folder: Path) -> Sent:
    """A generator of the device draws for each silo."""
    load = PrivateProgram.load

    def on_device(program: PrivateProgram, *arguments: Any) -> None:
        program._host_noise = False
        load(program, *arguments)
        assert isinstance(program._source, DeviceNoise)

    def engine(trainer: Trainer) -> FusedEngine:
        return FusedEngine(trainer, FusedOptions(CPU, chunk=2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateProgram, "load", on_device)
        return lived(engine, folder / "ledger.sqlite", config_of())


def side_by_side(folder: Path) -> Sent:
    """Two runs in one stack, of other seeds and other noise."""
    configs = [config_of("rounds=1", "seed=1"), config_of("rounds=1", "seed=2", "privacy.noise_multiplier=3.5")]
    trainers = [Experiment.of(config, FEDERATION).trainer for config in configs]
    engine = FusedEngine(trainers[0], FusedOptions(CPU, chunk=4), packed=trainers[1:])
    assert ", 1 stack of" in engine.describe()
    jobs, updates = dict[int, Job](), [list[Update](), list[Update]()]
    for run, trainer in enumerate(trainers):
        charging = Charging(trainer, folder / f"{run}.sqlite", os.urandom(32))
        state = initial_state(trainer.method, FEDERATION, trainer.config)
        admitted, secrets = charging.admitted(state, RoundContext(1, 1, (0, 1)))
        jobs[run] = Job(state, admitted, lambda result, heard=updates[run]: heard.append(result.update), secrets)
        charging.close()
    engine.rounds(jobs)
    found: Sent = {}
    for run in (0, 1):
        own = standardised(updates[run], {silo.name: folder / f"{run}.sqlite" for silo in FEDERATION.silos}, 2)
        found |= {(f"{run}/{silo}", *rest): numbers for (silo, *rest), numbers in own.items()}
    return found


def deployed(folder: Path, *overrides: str) -> Sent:
    """A silo's service with noise from the operating system, asked for the rounds of two runs."""
    home, name, config = folder / "home", FEDERATION.silos[1].name, config_of(*overrides)
    home.mkdir()
    service = SiloService(home, remote(FEDERATION, 1), 1, lambda _: None, lambda *_: Grant(math.inf))
    method = Experiment.of(config, FEDERATION).method
    blocks = {key: packed(part) for key, part in initial_state(method, FEDERATION, config).server.blocks.items()}
    found: Sent = {}
    for run in ("one", "two"):
        updates = []
        for number in range(1, ROUNDS + 1):
            answer = service.answer(Order(run, config, RoundContext(number, ROUNDS, (0, 1)), settled=0).frame(blocks))
            assert answer.kind == "update", answer.header
            updates.append(update_in(answer, name))
        sent = standardised(updates, {name: home / "ledger.sqlite"}, len(method.phases))  # all runs are charged alike
        found |= {(f"{run}/{silo}", *rest): numbers for (silo, *rest), numbers in sent.items()}
    return found


def pretrained(folder: Path) -> Sent:
    """Private steps before the only round, on blocks that nothing comes down for."""
    own = ("rounds=1", "sharing.scopes.first=upload", "sharing.scopes.second=upload", "privacy.pretraining=2")
    return plain(folder, *own)


def late(folder: Path) -> Sent:
    return plain(folder, "privacy.noise_multiplier=0", "privacy.epsilon=8", "privacy.allocation=late")


def sums(folder: Path) -> Sent:
    return plain(folder, "method.phases=0", "method.payloads=2")


def together(folder: Path, *overrides: str) -> Sent:
    own = (
        "privacy.trust=distributed",
        f"privacy.tolerated={TOLERATED}",
        "local.steps=1",
        "method.watched=false",
        *overrides,
    )
    return lived(ReferenceEngine, folder / "ledger.sqlite", config_of(*own), PARTNERS)


MANY = federation_of(*([0] * BATCH for _ in range(400)))  # every record is in every batch


def searched(engine_of: Callable[[Trainer], ReferenceEngine | FusedEngine]) -> tuple[Tensor, Tensor]:
    """What sums (silos and phases, numbers) and counts of a step were given, in deviations, if all were charged alike.

    A sum with noise s / sqrt(1 - c) and a count, which one record moves by 1/2, with s / (2 sqrt(c)) cost what was
    charged for; the count is known by what became of the bound: all norms are below it.
    """
    clipping = Quantile()
    config = config_of("rounds=1", "local.steps=1", "method.outputs=30", "privacy.clipping=quantile")
    trainer, heard = Experiment.of(config, MANY).trainer, list[Result]()
    state = initial_state(trainer.method, MANY, config)
    everybody = tuple(range(len(MANY)))
    secrets = {silo: keyed(os.urandom(32), "round 1") for silo in everybody}
    engine_of(trainer).round(Job(state, RoundContext(1, 1, everybody), heard.append, secrets))
    (event,) = {plan.events(1)[UPDATE] for plan in trainer.privacy}
    assert isinstance(event, Gaussian)
    gradient = event.noise_multiplier * CLIP / BATCH / math.sqrt(1 - clipping.share)
    count = event.noise_multiplier / BATCH / (2 * math.sqrt(clipping.share))
    rows, counts = [], []
    for result in heard:
        for key, tensors in result.update.blocks.items():
            below = clipping.target - (result.state.tensors[BOUND + key.block].double() / CLIP).log() / clipping.pace
            rows.append(torch.cat([tensor.flatten() for tensor in tensors.values()]).double() / gradient)
            counts.append((below - 1.0) / count)
    return torch.stack(rows), torch.stack(counts)
