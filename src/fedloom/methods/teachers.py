"""Whom a distilling server samples: what each silo sent last, or what was averaged, and earlier versions of it.

All of it is in the server's state, so a run that is resumed goes on with the same teachers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.config import ServerConfig
from fedloom.errors import FedloomError
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, Pathway
from fedloom.methods.latents import PAYLOAD
from fedloom.methods.steps import ServerState
from fedloom.outline import in_outline
from fedloom.sharing.codec import placed, under
from fedloom.sharing.plan import BlockKey, Scope, Tensors
from fedloom.sharing.update import Update

MERGED = ""  # the site of what was averaged: "server" is that of the server's own model
ROUND, RECORDS = "round/", "records/"  # what the server remembers of each silo


@dataclass(frozen=True)
class Teacher:
    """A generator at the server: the newest of a silo, or a group's average."""

    name: str
    site: Site
    records: float
    age: int  # rounds since it was sent


@dataclass(frozen=True)
class Version:
    """A teacher as it is now, or was before."""

    __repr__ = in_outline

    blocks: Mapping[BlockKey, Tensors]  # by their names in the plan
    latents: Tensors  # what came with them about the silo's latents


@dataclass(frozen=True)
class Teachers:
    """Those of a method under a configuration."""

    method: Method  # as the silos have it
    settings: ServerConfig

    @property
    def source(self) -> Pathway:
        """How a teacher generates."""
        return next(iter(self.method.pathways.values()))

    @property
    def are_silos(self) -> bool:
        """Whether the server samples what each silo sent, not what was averaged."""
        rules = self.method.plan.blocks
        return self.settings.teachers == "silos" or any(rules[b].scope is Scope.SILO for b in self.source.blocks)

    def present(self, server: ServerState, context: RoundContext) -> list[Teacher]:
        """Whom the server can sample, in the order of their names: their places in the federation do not matter."""
        groups = self.method.plan.groups
        records = under(RECORDS, server.memory)
        if self.are_silos:
            return [
                Teacher(
                    name, _site(name, counts), float(counts.sum()), context.round - int(server.memory[ROUND + name])
                )
                for name, counts in sorted(records.items())
            ]
        totals = sum(records.values(), torch.zeros(len(groups), dtype=torch.float64)).tolist()
        found = [Teacher(name, Site(MERGED, (g,)), totals[g], 0) for g, name in enumerate(groups)]
        return [teacher for teacher in found if teacher.records]

    def versions(self, teacher: Teacher, server: ServerState) -> Iterator[Version]:
        """The newest, then those remembered, from new to old."""
        keys = self._keys(teacher)
        for number in range(self.settings.replay + 1):
            if all(_older(kept, number) in server.blocks for kept in keys.values()):
                parts = {key: server.blocks[_older(kept, number)] for key, kept in keys.items()}
                yield Version(parts, _described(server, teacher.name, number))

    def sent_by(self, server: ServerState, site: Site) -> dict[BlockKey, Tensors]:
        """A silo's newest generator by the names of the plan; nothing where the server keeps averages alone."""
        if not self.are_silos:
            return {}
        kept = self._keys(Teacher(site.name, site, 0.0, 0))
        return {key: server.blocks[own] for key, own in kept.items() if own in server.blocks}

    def renewed(self, server: ServerState, updates: Sequence[Update]) -> ServerState:
        """The server with what silos sent that is newer than what it has."""
        blocks, memory = dict(server.blocks), dict(server.memory)
        for update in updates:
            if update.round <= memory.get(ROUND + update.silo, torch.tensor(0)):
                continue  # overtaken on its way by a newer one
            own = {key: part for key, part in update.blocks.items() if self._is_kept(key)}
            self._check(update, {key: part for key, part in own.items() if key not in blocks})
            blocks |= {self._kept(key, update.silo): part for key, part in own.items()}
            memory[ROUND + update.silo] = torch.tensor(update.round)
            memory[RECORDS + update.silo] = self._records(update)
            sent = update.payloads.get(PAYLOAD, {})
            memory |= placed(_latents(update.silo, 0), sent)
        return ServerState(blocks, memory)

    def remembered(self, server: ServerState, before: ServerState, context: RoundContext) -> ServerState:
        """The server with the versions that it had before this round, as far back as replay goes."""
        blocks, memory = dict(server.blocks), dict(server.memory)
        # Only teachers of earlier rounds: an average that nobody has trained yet is not worth replaying.
        for teacher in self.present(before, context):
            keys = self._keys(teacher).values()
            if all(blocks[key] is before.blocks[key] for key in keys):
                continue
            for number in range(self.settings.replay):
                known = (key for key in keys if _older(key, number) in before.blocks)
                blocks |= {_older(key, number + 1): before.blocks[_older(key, number)] for key in known}
                described = _described(before, teacher.name, number)
                memory |= placed(_latents(teacher.name, number + 1), described)
        return ServerState(blocks, memory)

    def _keys(self, teacher: Teacher) -> dict[BlockKey, BlockKey]:
        """Of each block that a teacher generates with its name in the plan, and under which the server keeps it."""
        plan = self.method.plan
        keys = (key for block in self.source.blocks for key in plan.prefixes(block, teacher.site).values())
        return {key: self._kept(key, teacher.name) for key in keys}

    def _is_kept(self, key: BlockKey) -> bool:
        """Whether the server keeps each silo's copy of a block, beside what it averages."""
        alone = self.method.plan.blocks[key.block].scope is Scope.SILO
        return alone or (self.settings.teachers == "silos" and key.block in self.source.blocks)

    def _kept(self, key: BlockKey, name: str) -> BlockKey:
        """Under which name: that of the silo as well, where the plan's is the average's."""
        alone = self.method.plan.blocks[key.block].scope is Scope.SILO
        return key if alone or not self._is_kept(key) else BlockKey(key.block, f"silo={name}/{key.owner}")

    def _records(self, update: Update) -> Tensor:
        """How many of each group a silo says it has."""
        counts = [update.counts.get(f"group={group}", 0.0) for group in self.method.plan.groups]
        return torch.tensor(counts, dtype=torch.float64)

    def _check(self, update: Update, unknown: Mapping[BlockKey, Tensors]) -> None:
        """Refuse what does not fit the networks that the silo is known to have."""
        if not unknown:
            return
        site = _site(update.silo, self._records(update))
        known = self.method.plan.split(self.method.build(site).state_dict(), site)
        for key, part in unknown.items():
            for name in sorted({*part, *known.get(key, {})}):
                ours, theirs = known.get(key, {}).get(name), part.get(name)
                if ours is None or theirs is None or ours.shape != theirs.shape:
                    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (theirs, ours)]
                    raise FedloomError(
                        f"silo '{update.silo}' sent '{key}/{name}' of shape {shapes[0]}, but its network has "
                        f"{shapes[1]}: refused"
                    )


def _older(key: BlockKey, version: int) -> BlockKey:
    """Where an earlier version of a block is kept."""
    return BlockKey(key.block, f"before-{version}/{key.owner}") if version else key


def _latents(silo: str, version: int) -> str:
    """Under which names what a silo tells of its latents is remembered, with a decoder of this version."""
    return f"{PAYLOAD}/before-{version}/{silo}/" if version else f"{PAYLOAD}/{silo}/"


def _described(server: ServerState, silo: str, version: int) -> Tensors:
    """What a silo told of its latents."""
    return under(_latents(silo, version), server.memory)


def _site(silo: str, counts: Tensor) -> Site:
    """A silo by its records of each group; where it tells nothing of groups, there is the first."""
    return Site(silo, tuple(torch.nonzero(counts).flatten().tolist()) or (0,))
