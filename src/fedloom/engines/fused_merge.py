"""Weighted means per scope over stacks of silos: one matrix product for each tensor, in float64, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedloom.engines.pieces import Sum
from fedloom.federation.rounds import Site
from fedloom.sharing.aggregation import Aggregator, weight_of
from fedloom.sharing.plan import BlockKey, Scope, SharingPlan, Tensors
from fedloom.sharing.update import Update


class StackedMean:
    """Takes the chunks of a round one after the other; equals the mean of :class:`Aggregator` over all updates."""

    def __init__(self, plan: SharingPlan, aggregator: Aggregator, totals: Mapping[str, float]) -> None:
        self._plan, self._weighting, self._former = plan, aggregator.weighting, aggregator.sums
        self._totals = dict(totals)
        self._sums: dict[BlockKey, Tensors] = {}
        self._weights: dict[BlockKey, float] = {}

    def sums(
        self, weights: Tensors, positions: Sequence[int], sites: Sequence[Site], updates: Sequence[Update]
    ) -> list[Sum]:
        """What a chunk adds: stacked weights, and where in them each silo lies, with its site and its update."""
        slots = sent_ahead(torch.tensor(positions), next(iter(weights.values())).device)
        parts: list[Sum] = []
        for block, rule in self._plan.blocks.items():
            if block not in self._plan.merged:
                continue
            owners = [self._plan.prefixes(block, site) for site in sites]
            for prefix in owners[0]:  # the silos of a stack have their parameters under the same names
                mine = {n[len(prefix) :]: tensor[slots] for n, tensor in weights.items() if n.startswith(prefix)}
                parts += self._sums_of(mine, [keys[prefix] for keys in owners], rule.scope, updates)
        return parts

    def take(self, parts: Sequence[Sum]) -> None:
        """Add a chunk; takes no memory, so that a chunk that does not fit leaves no half of itself behind."""
        for key, weight, tensors in parts:
            self._weights[key] = self._weights.get(key, 0.0) + weight
            sums = self._sums.setdefault(key, tensors)
            for name, tensor in tensors.items():
                if sums is not tensors:
                    sums[name] += tensor

    def _sums_of(self, weights: Tensors, keys: list[BlockKey], scope: Scope, updates: Sequence[Update]) -> list[Sum]:
        """For each owner of a block its silos' weight together, and the weighted sum of each tensor."""
        distinct = sorted(set(keys))
        shares = torch.zeros(len(distinct), len(keys), dtype=torch.float64)
        for position, (key, update) in enumerate(zip(keys, updates, strict=True)):
            shares[distinct.index(key), position] = weight_of(update, key, scope, self._weighting, self._totals)
        sums: list[Tensors] = [{} for _ in distinct]
        factors = sent_ahead(shares, next(iter(weights.values())).device)
        for name, stacked in weights.items():
            totals = self._former.totals(factors, stacked)
            for tensors, total in zip(sums, totals, strict=True):
                tensors[name] = total.reshape(stacked.shape[1:])
        return list(zip(distinct, shares.sum(dim=1).tolist(), sums, strict=True))

    def result(self, known: Mapping[BlockKey, Tensors]) -> dict[BlockKey, Tensors]:
        """The weighted means of all chunks so far, on the host, in the dtypes of the copies ``known`` to the server."""
        return {
            key: on_host({n: self._former.mean(t, self._weights[key], known[key][n].dtype) for n, t in sums.items()})
            for key, sums in self._sums.items()
        }


def sent_ahead(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device that may still be at work, without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def on_host(tensors: Tensors) -> Tensors:
    """Copies on the host; those from a GPU travel together, into memory that it reaches fast, also on the way back."""
    found = {}
    for name, tensor in tensors.items():
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        found[name] = kept.copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    return found
