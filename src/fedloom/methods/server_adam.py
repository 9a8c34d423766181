"""An Adam at the server: how far the average of a round lies from where it began is its gradient.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021 (arXiv 2003.00295), algorithm 2, FedAdam, with the bias
correction of Kingma, Ba (arXiv 1412.6980). Where silos take one step of SGD in a round, that gradient is the one over
all records times their learning rate, which then cancels: so silos that show the server their noisy sum alone still
train by Adam. It is a function of what left them and costs no further privacy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.federation.rounds import Site
from fedloom.methods.base import Method
from fedloom.methods.steps import Distilled, ServerRound, ServerState, ServerStep, Stepped
from fedloom.sharing.codec import placed, under
from fedloom.sharing.plan import BlockKey, Tensors
from fedloom.streams import Streams

ADAM = "adam/"  # under which the server remembers the moments of each copy
FIRST, SECOND = 0.9, 0.99  # of the past in the moments, as Reddi et al. have them
EPSILON = 1e-8
ROUNDS = "rounds"  # in which a copy was merged


@dataclass(frozen=True)
class ServerAdam(ServerStep):
    """Moves every merged copy by Adam, and gives the step that it stands before what came of that."""

    then: ServerStep
    learning_rate: float

    @property
    def needs_each(self) -> bool:
        """Whether the step behind it does."""
        return self.then.needs_each

    @property
    def closes(self) -> bool:
        """Whether the step behind it does."""
        return self.then.closes

    def initial(self, streams: Streams, /) -> ServerState:
        """What the step behind it brings."""
        return self.then.initial(streams)

    def __call__(self, round: ServerRound) -> Stepped:
        """A copy that nobody took part for stays, and so do its moments."""
        memory, moved = dict(round.state.memory), dict[BlockKey, Tensors]()
        for key, merged in round.merged.items():
            place = f"{ADAM}{key}/"
            moved[key], known = self._moved(round.before.blocks[key], merged, under(place, memory))
            memory |= placed(place, known)
        return self.then(replace(round, state=replace(round.state, memory=memory), merged=moved))

    def learned(self, state: ServerState, taught: Distilled, /) -> ServerState:
        """What the step behind it makes of what was learned."""
        return self.then.learned(state, taught)

    @property
    def of_silos(self) -> Method | None:
        """As the step behind it says."""
        return self.then.of_silos

    def sent_by(self, state: ServerState, site: Site, /) -> dict[BlockKey, Tensors]:
        """What the step behind it keeps."""
        return self.then.sent_by(state, site)

    def _moved(self, before: Tensors, merged: Tensors, known: Tensors) -> tuple[Tensors, Tensors]:
        """A copy after one step, and its moments; what is no real number, such as a counter, is taken as it came."""
        count = known.get(ROUNDS, torch.zeros((), dtype=torch.int64)) + 1
        moved, moments = dict(merged), {ROUNDS: count}
        for name, start in before.items():
            if start.is_floating_point():
                gradient = start - merged[name]
                m = FIRST * known.get(f"{name}/first", 0.0) + (1 - FIRST) * gradient
                v = SECOND * known.get(f"{name}/second", 0.0) + (1 - SECOND) * gradient.square()
                moved[name] = start - self._step(m, v, int(count))
                moments |= {f"{name}/first": m, f"{name}/second": v}
        return moved, moments

    def _step(self, first: Tensor, second: Tensor, count: int) -> Tensor:
        deviation = (second / (1 - SECOND**count)).sqrt() + EPSILON
        return self.learning_rate / (1 - FIRST**count) * first / deviation
