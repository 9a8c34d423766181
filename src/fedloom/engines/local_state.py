"""What changes in a silo's round, as data: weights, moments and clip bounds; how they begin and what is kept of them.

Everything is a stack of silos. The plain loop's has one, whose weights are those of its model.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor

from fedloom.engines.base import SiloState
from fedloom.engines.optimizers import LocalOptimizer
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, Phase, fresh_blocks
from fedloom.privacy.dp_sgd import DPSGD
from fedloom.sharing.codec import placed, under
from fedloom.sharing.compression import UNCOMPRESSED, Compressed, coded, decoded
from fedloom.sharing.plan import Tensors
from fedloom.streams import Streams

MODEL, OPTIMIZER, BOUND, RESIDUE = "model/", "optimizer/", "clip-bound/", "residue/"


class LocalState:
    """Weights, moments and clip bounds of a stack of silos, all moved in place."""

    def __init__(
        self,
        phases: Sequence[Phase],
        weights: Tensors,
        trained: Sequence[Iterable[str]],
        received: Container[str],
        mechanism: DPSGD | None = None,
        compiled: bool = False,
        compressed: Compressed = UNCOMPRESSED,
    ) -> None:
        """``trained`` names the weights that each phase trains, ``received`` are those that come down."""
        self.weights, self._phases = weights, phases
        self.own = [name for name in weights if name not in received]
        self.optimizers = [
            LocalOptimizer(phase.optimizer, {name: weights[name] for name in names}, compiled)
            for phase, names in zip(phases, trained, strict=True)
        ]
        some = next(iter(weights.values()), torch.zeros(0))  # a method that trains nothing may have none
        clipped = [phase.name for phase in phases if mechanism is not None and phase.touches_records]
        self.bounds = {name: torch.zeros(len(some), device=some.device) for name in clipped}
        self._compression = compressed.compression
        moving = compressed.names({name: stack[0] for name, stack in weights.items()} if compressed.blocks else {})
        self._residues = {name: torch.zeros_like(weights[name]) for name in moving}  # what rounding has left out
        self._searched = mechanism is not None and mechanism.clipping.share > 0

    def begin(self, context: RoundContext) -> None:
        """A new round."""
        for optimizer in self.optimizers:
            optimizer.begin(context)

    def load(self, position: int, kept: Tensors, method: Method, site: Site, streams: Streams) -> None:
        """Give a silo what it kept, and in its first round fresh weights of its own."""
        own = under(MODEL, kept)
        if not own.keys() >= set(self.own):
            own = method.plan.join(fresh_blocks(method, site, streams), site) | own
        for name in self.own:
            self.weights[name][position] = own[name]
        for phase, optimizer in zip(self._phases, self.optimizers, strict=True):
            if moments := under(f"{OPTIMIZER}{phase.name}/", kept):
                optimizer.load(position, moments)
        left = under(RESIDUE, kept)
        for name, residue in self._residues.items():
            residue[position] = left.get(name, 0.0)

    def load_bounds(self, kept: Sequence[Tensors], mechanisms: Sequence[DPSGD]) -> None:
        """Give the first silos the bounds that they found, or else those that their mechanisms start with."""
        for phase, bounds in self.bounds.items():
            found = zip(kept, mechanisms, strict=True)
            starts = [own.get(BOUND + phase, mechanism.clipping.start()) for own, mechanism in found]
            bounds[: len(starts)] = torch.stack(starts)

    def compress(self, received: Tensors, silos: int) -> Tensors:
        """Let the first ``silos`` silos have the weights that the server will make of their codes; returns those.

        Nothing of records is in a code but what is in the weights that it stands for, of this round and earlier ones.
        """
        if not self._residues:
            return {}
        moves = {n: self.weights[n][:silos] - received[n][:silos] + left[:silos] for n, left in self._residues.items()}
        codes = coded(self._compression, moves)
        for name, move in decoded(codes).items():
            self._residues[name][:silos] = moves[name] - move
            self.weights[name][:silos] = received[name][:silos] + move
        return codes

    def kept(self, silos: int) -> list[SiloState]:
        """What each of the first ``silos`` silos keeps until its next round, on the host."""
        stacked = {MODEL + name: self.weights[name][:silos].cpu() for name in self.own}
        for phase, optimizer in zip(self._phases, self.optimizers, strict=True):
            if phase.optimizer.keep:
                stacked |= placed(f"{OPTIMIZER}{phase.name}/", optimizer.kept(silos))
        if self._searched:
            stacked |= {BOUND + phase: bounds[:silos].cpu() for phase, bounds in self.bounds.items()}
        stacked |= {RESIDUE + name: residue[:silos].cpu() for name, residue in self._residues.items()}
        # Copied, so that one silo's state does not hold the memory of a whole chunk; contiguous, as others expect it.
        rows = ({name: _copied(tensor[i]) for name, tensor in stacked.items()} for i in range(silos))
        return [SiloState(row) for row in rows]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
