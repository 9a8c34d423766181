"""Stacks: silos whose models have one architecture, with their records end to end on the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.engines.base import site_of
from fedloom.engines.training import Trainer
from fedloom.federation.records import Records, Silo, concatenate
from fedloom.federation.rounds import Site


@dataclass(frozen=True, eq=False)
class Stack:
    """Silos that train together."""

    model: nn.Module  # stands for the model of each silo; its own weights are never used
    silos: tuple[int, ...]
    records: Records  # of all its silos, end to end, as stored
    offsets: dict[int, int]  # where a silo's records begin

    def __contains__(self, silo: int) -> bool:
        return silo in self.offsets


def stacks_of(trainer: Trainer, device: torch.device) -> list[Stack]:
    """Divide a federation by architecture and by the columns of its records."""
    models: dict[Hashable, nn.Module] = {}
    members: dict[tuple[Any, ...], list[int]] = {}
    for index, silo in enumerate(trainer.federation.silos):
        site = site_of(trainer.federation, index)
        kind = trainer.method.kind(site)
        if kind not in models:
            # Silos of one kind have the same model, so one of them stands for the rest.
            models[kind] = trainer.method.build(site)
        members.setdefault((kind, *_columns(silo)), []).append(index)
    stacks: dict[tuple[Any, ...], list[int]] = {}
    for (kind, *columns), silos in members.items():
        stacks.setdefault((_architecture(models[kind]), *columns), []).extend(silos)
    return [_stack(trainer, models, sorted(silos), device) for silos in stacks.values()]


def _stack(trainer: Trainer, models: dict[Hashable, nn.Module], silos: list[int], device: torch.device) -> Stack:
    tables = [trainer.federation.silos[silo].train for silo in silos]
    offsets, offset = {}, 0
    for silo, table in zip(silos, tables, strict=True):
        offsets[silo] = offset
        offset += len(table)
    model = models[trainer.method.kind(site_of(trainer.federation, silos[0]))].to(device)
    return Stack(model, tuple(silos), concatenate(tables).to(device), offsets)


def _columns(silo: Silo) -> tuple[Any, ...]:
    """Which columns a silo's records have, and how its examples are stored."""
    return silo.train.x.dtype, silo.train.subject is None, silo.train.attributes is None


def _architecture(model: nn.Module) -> tuple[Any, ...]:
    """Equal only for models that compute the same function of their weights."""
    settings = [
        (name, type(module).__qualname__, module.training, _public(module)) for name, module in model.named_modules()
    ]
    state = model.state_dict()
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()]
    fixed = [
        (name, buffer.dtype, tuple(buffer.shape), buffer.flatten().tolist())
        for name, buffer in model.named_buffers()
        if name not in state
    ]
    return repr(settings), repr(shapes), repr(fixed)


def _public(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, Tensor | nn.Module)
    }


def positions_by(key: Callable[[Site], Any], sites: list[Site]) -> dict[Any, list[int]]:
    """The positions in a chunk whose sites share a key."""
    found: dict[Any, list[int]] = {}
    for position, site in enumerate(sites):
        found.setdefault(key(site), []).append(position)
    return found
