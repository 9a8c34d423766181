"""The mean of moves of bounded length: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?",
arXiv 1911.07963, 2019."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from fedloom.settings import above
from fedloom.sharing.aggregation import Copies, Merge
from fedloom.sharing.plan import Tensors


@dataclass(frozen=True, kw_only=True)
class NormBound(Merge):
    """No silo moves a block by more than its weight times ``bound``, measured over all of the block's numbers."""

    name = "norm-bound"
    weighted = True

    bound: float = field(default=1.0, metadata=above(0))

    def __call__(self, copies: Copies) -> Tensors:
        """Each copy is pulled back towards the server's own, or towards zero where it has none; then the mean."""
        return replace(copies, each=[self._bounded(tensors, copies.known) for tensors in copies.each]).mean()

    def _bounded(self, tensors: Tensors, known: Tensors) -> Tensors:
        numbers = {name: tensor for name, tensor in tensors.items() if tensor.dtype.is_floating_point}
        start = {name: known.get(name, torch.zeros_like(tensor)).double() for name, tensor in numbers.items()}
        moves = {name: tensor.double() - start[name] for name, tensor in numbers.items()}
        length = math.sqrt(sum(move.square().sum().item() for move in moves.values()))
        scale = min(1.0, self.bound / length) if length else 1.0
        return {**tensors, **{n: (start[n] + scale * move).to(numbers[n].dtype) for n, move in moves.items()}}


MERGE = NormBound
