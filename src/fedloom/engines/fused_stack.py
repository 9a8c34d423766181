"""Stacks: silos that compute the same function of their weights, of one run or several, with their records."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedloom.config import LocalConfig, PrivacyConfig
from fedloom.engines.base import site_of
from fedloom.engines.fused_records import ChunkTable, RecordTable, WholeTable, room_on, size_of
from fedloom.engines.training import Trainer
from fedloom.federation.records import Records, Silo, concatenate
from fedloom.federation.rounds import Site
from fedloom.methods.base import Phase
from fedloom.outline import in_outline
from fedloom.privacy.clipping import SMALLEST
from fedloom.privacy.dp_sgd import DPSGD
from fedloom.privacy.silo_privacy import CLIPPINGS, SiloPrivacy
from fedloom.sharing.compression import Compressed
from fedloom.sharing.plan import Down, Tensors

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class Member:
    """One silo of one of the runs that an engine carries out together."""

    run: int
    index: int  # of the silo in its federation
    trainer: Trainer

    @property
    def silo(self) -> Silo:
        """The silo itself, with its records."""
        return self.trainer.federation.silos[self.index]

    @cached_property
    def site(self) -> Site:
        """How models and the sharing plan see it."""
        return site_of(self.trainer.federation, self.index)

    @cached_property
    def steps(self) -> int:
        """How many it takes in a round."""
        return self.trainer.steps(self.index)

    @property
    def privacy(self) -> SiloPrivacy:
        """What its records are used for under DP-SGD."""
        return self.trainer.privacy[self.index]


@dataclass(frozen=True)
class StackKind:
    """What silos must have in common to train in one stack, whichever run they belong to."""

    architecture: str
    columns: tuple[Any, ...]
    phases: tuple[Phase, ...]
    sent: tuple[str, ...]  # the blocks that come down
    compressed: Compressed
    settle: Callable[[Tensors], Tensors]
    local: LocalConfig
    rounds: int  # an objective may look at it
    privacy: DPSGD | None  # stands for theirs, which differ in noise, rates and first clip bounds


@dataclass(frozen=True, eq=False)
class Stack:
    """Silos that train together."""

    __repr__ = in_outline

    kind: StackKind
    model: nn.Module  # stands for the model of each silo; its own weights are never used
    members: tuple[Member, ...]
    table: RecordTable  # of their records; runs may share a silo
    device: torch.device
    constants: dict[Member, Tensors]  # what differs between models beside their weights, such as prior means

    def sample(self, rows: int) -> Records:
        """Some records, on the device."""
        silos = list(dict.fromkeys(member.silo for member in self.members))[:rows]
        return concatenate([silo.train.take(torch.arange(min(rows, len(silo)))) for silo in silos]).to(self.device)


def kinds_of(trainer: Trainer, run: int = 0) -> list[tuple[StackKind, list[tuple[Member, nn.Module]]]]:
    """A run's silos, each with a model that stands for its own, divided by kind."""
    models: dict[Hashable, nn.Module] = {}
    kinds: dict[tuple[Any, ...], StackKind] = {}
    found = []
    for index in members_of(trainer):
        member = Member(run, index, trainer)
        built, columns = trainer.method.kind(member.site), _columns(member.silo)
        if built not in models:
            # Silos whose models are built alike: one of them stands for the rest.
            models[built] = trainer.method.build(member.site)
        if (built, *columns) not in kinds:
            kinds[built, *columns] = _kind(member, models[built], columns)
        found.append((kinds[built, *columns], (member, models[built])))
    return together(found)


def members_of(trainer: Trainer) -> Sequence[int]:
    """The silos that an engine gets ready for: all, or of silos that are made on demand those ever drawn."""
    if not trainer.federation.on_demand:
        return range(len(trainer.federation))
    return [silo for silo, rounds in enumerate(trainer.attended) if rounds]


def stacks_of(trainers: Sequence[Trainer], device: torch.device) -> list[Stack]:
    """Divide the silos of all runs by kind."""
    divided = (part for run, trainer in enumerate(trainers) for part in kinds_of(trainer, run))
    kinds = [(kind, [item for part in parts for item in part]) for kind, parts in together(divided)]
    everybody = {member.silo for _, silos in kinds for member, _ in silos}
    on_demand = any(trainer.federation.on_demand for trainer in trainers)
    table = ChunkTable if on_demand or size_of(everybody) > room_on(device) else WholeTable
    return [_stack(kind, silos, device, table) for kind, silos in kinds]


def together(pairs: Iterable[tuple[K, V]]) -> list[tuple[K, list[V]]]:
    """Values whose keys are equal, in their order; keys need not be hashable."""
    found: list[tuple[K, list[V]]] = []
    for key, value in pairs:
        same = next((values for known, values in found if known == key), None)
        if same is None:
            found.append((key, [value]))
        else:
            same.append(value)
    return found


def _kind(member: Member, model: nn.Module, columns: tuple[Any, ...]) -> StackKind:
    method, config = member.trainer.method, member.trainer.config
    return StackKind(
        architecture=_architecture(model),
        columns=columns,
        phases=method.phases,
        sent=tuple(block for block, rule in method.plan.blocks.items() if rule.down is not Down.NOTHING),
        compressed=method.plan.compressed,
        settle=method.settle,
        local=config.local,
        rounds=config.rounds,
        privacy=_alike(member.privacy.settings) if member.trainer.privacy else None,
    )


def _alike(settings: PrivacyConfig) -> DPSGD:
    """What mechanisms of one kind have in common: the rule by which they clip, whom they protect and what they guard.

    Whatever is a silo's own is 1 here, so that it stands for nobody's: a program must ask each member's plan for it.
    """
    clipping = CLIPPINGS[settings.clipping](1.0, SMALLEST)
    return DPSGD(1.0, rate=1.0, expected=1.0, clipping=clipping, unit=settings.unit, blocks=settings.blocks)


def _stack(
    kind: StackKind, silos: list[tuple[Member, nn.Module]], device: torch.device, make: type[WholeTable | ChunkTable]
) -> Stack:
    table = make(list(dict.fromkeys(member.silo for member, _ in silos)), device)
    fixed = [(member, _fixed(model)) for member, model in silos]
    _, first = fixed[0]
    differing = [n for n, t in first.items() if any(not torch.equal(t, other[n]) for _, other in fixed)]
    constants = {member: {name: tensors[name].to(device) for name in differing} for member, tensors in fixed}
    return Stack(kind, silos[0][1].to(device), tuple(member for member, _ in silos), table, device, constants)


def _columns(silo: Silo) -> tuple[Any, ...]:
    """Which columns a silo's records have, what they are and how they are stored."""
    like = silo.like
    return like.modality.name, like.x.dtype, like.subject is None, like.attributes is None


def _architecture(model: nn.Module) -> str:
    """Equal only for models that compute the same function of their weights and constants."""
    settings = [
        (name, type(module).__qualname__, module.training, _public(module)) for name, module in model.named_modules()
    ]
    tensors = {**model.state_dict(), **_fixed(model)}
    return repr((settings, [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]))


def _fixed(model: nn.Module) -> Tensors:
    """Buffers that are no part of the weights."""
    state = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in state}


def _public(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, Tensor | nn.Module)
    }
