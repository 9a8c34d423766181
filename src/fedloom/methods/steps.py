"""Server steps: what the server does with what reached it in a round, and what it then has to learn itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.config import LocalConfig
from fedloom.federation.records import Records
from fedloom.federation.rounds import RoundContext, Site
from fedloom.outline import in_outline
from fedloom.sharing.plan import BlockKey, Tensors
from fedloom.sharing.update import Update
from fedloom.streams import Streams

if TYPE_CHECKING:
    from fedloom.methods.base import Method


@dataclass(frozen=True)
class ServerState:
    """What the server knows: the merged copies of shared blocks, blocks of its own, and whatever it must remember."""

    __repr__ = in_outline

    blocks: dict[BlockKey, Tensors]
    memory: Tensors = field(default_factory=dict)
    averages: dict[BlockKey, Tensors] = field(default_factory=dict)  # of all blocks over the rounds, where asked for

    @property
    def sampled(self) -> dict[BlockKey, Tensors]:
        """The blocks that samples are made with."""
        return self.averages or self.blocks

    def averaged(self, before: Mapping[BlockKey, Tensors], past: float) -> ServerState:
        """With the running mean of its blocks, whose earlier value counts ``past``; nothing if that is 0."""
        if not past:
            return self
        averages = {
            key: {n: mean_of_old_and_new(before.get(key, block).get(n, t), t, past) for n, t in block.items()}
            for key, block in self.blocks.items()
        }
        return replace(self, averages=averages)


def mean_of_old_and_new(old: Tensor, new: Tensor, past: float) -> Tensor:
    """A running mean's next value; what counts in whole numbers is no mean."""
    return torch.lerp(new, old, past) if new.is_floating_point() else new


@dataclass(frozen=True, eq=False)
class DistillationJob:
    """What the server learns in a round: local training on synthetic records, for an engine to carry out."""

    __repr__ = in_outline

    method: Method  # of a single site, where all blocks stay
    local: LocalConfig
    records: Records
    weights: Tensors  # to start from, by parameter
    moments: Tensors  # of an optimiser that keeps them
    context: RoundContext
    seed: int


@dataclass(frozen=True)
class Distilled:
    """What came of a distillation: the model's weights, the optimiser's moments where it keeps them, mean losses."""

    __repr__ = in_outline

    weights: Tensors
    moments: Tensors
    terms: Mapping[str, float]


@dataclass(frozen=True)
class ServerRound:
    """All that a server step is given of a round."""

    __repr__ = in_outline

    state: ServerState  # as earlier steps of this round left it
    before: ServerState  # as the round found it
    merged: Mapping[BlockKey, Tensors]  # one copy of each block that is shared and was sent
    updates: Sequence[Update]  # what is seen of single silos, in their order, whatever order they arrived in
    context: RoundContext
    streams: Streams
    device: torch.device  # where a distillation is to be prepared


@dataclass(frozen=True)
class Stepped:
    """What came of a server step; what a distillation teaches is taken in by :meth:`ServerStep.learned`."""

    state: ServerState
    distillation: DistillationJob | None = None
    terms: Mapping[str, float] = field(default_factory=dict)  # for the log


class ServerStep:
    """What the server does with what reached it in a round; a step that is not told otherwise changes nothing."""

    @property
    def needs_each(self) -> bool:
        """Whether it looks at blocks of single silos; else it is shown none, and sums will do."""
        return False

    @property
    def closes(self) -> bool:
        """Whether the last round leaves other weights than averages: no round goes on from them, nor a mean of them."""
        return False

    def initial(self, _streams: Streams, /) -> ServerState:
        """The blocks and memory that the server brings itself, beside the merged copies."""
        return ServerState({})

    def __call__(self, round: ServerRound) -> Stepped:
        """One round."""
        return Stepped(round.state)

    def learned(self, state: ServerState, _taught: Distilled, /) -> ServerState:
        """The server after its distillation."""
        return state

    @property
    def of_silos(self) -> Method | None:
        """The method as the silos have it, where the server may generate with a model of its own."""
        return None

    def sent_by(self, _state: ServerState, _site: Site, /) -> dict[BlockKey, Tensors]:
        """A silo's newest blocks by the names of the plan, where the server keeps them beside what it merges."""
        return {}


class Merged(ServerStep):
    """Takes over what was merged and keeps the rest: a group that nobody took part for keeps its branch."""

    def __call__(self, round: ServerRound) -> Stepped:
        """New copies in the place of the old."""
        return Stepped(replace(round.state, blocks={**round.state.blocks, **round.merged}))


@dataclass(frozen=True)
class Steps(ServerStep):
    """One step after the other; only the last may have a distillation."""

    steps: tuple[ServerStep, ...]

    @property
    def needs_each(self) -> bool:
        """Whether one of them does."""
        return any(step.needs_each for step in self.steps)

    @property
    def closes(self) -> bool:
        """Whether one of them does."""
        return any(step.closes for step in self.steps)

    def initial(self, streams: Streams, /) -> ServerState:
        """What all of them bring."""
        found = [step.initial(streams) for step in self.steps]
        return ServerState(
            {k: v for s in found for k, v in s.blocks.items()}, {k: v for s in found for k, v in s.memory.items()}
        )

    def __call__(self, round: ServerRound) -> Stepped:
        """Each sees what those before it left."""
        stepped, terms = Stepped(round.state), dict[str, float]()
        for step in self.steps:
            assert stepped.distillation is None, "only the last step may have a distillation"
            stepped = step(replace(round, state=stepped.state))
            terms |= stepped.terms
        return replace(stepped, terms=terms)

    def learned(self, state: ServerState, distilled: Distilled, /) -> ServerState:
        """What the last step makes of what the distillation learned: no other has one."""
        return self.steps[-1].learned(state, distilled)

    @property
    def of_silos(self) -> Method | None:
        """The silos' own method, where the last step trains another one at the server."""
        return self.steps[-1].of_silos

    def sent_by(self, state: ServerState, site: Site, /) -> dict[BlockKey, Tensors]:
        """What the last step has of a silo's own blocks."""
        return self.steps[-1].sent_by(state, site)
