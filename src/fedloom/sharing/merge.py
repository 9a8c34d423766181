"""Merging updates by scope: weighted means in float64; a copy that nobody sent stays as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedloom.sharing.plan import BlockKey, Scope, SharingPlan, Tensors
from fedloom.sharing.update import Update

Weighting = Literal["size", "equal-groups", "equal"]


def weight_of(update: Update, key: BlockKey, scope: Scope, weighting: Weighting, totals: dict[str, float]) -> float:
    """How much one silo's copy counts before normalisation.

    By size: the number of records behind the copy. Equal: every silo the same. With equal groups: a GLOBAL copy counts
    by its silo's share of each group's participating records, so that every group present weighs the same.
    """
    if weighting == "equal":
        return 1.0
    if scope is Scope.GLOBAL and weighting == "equal-groups":
        return sum(n / totals[group] for group, n in update.weights.items() if group != "all")
    return update.weights[key.owner if scope is Scope.GROUP else "all"]


def merge(updates: Sequence[Update], plan: SharingPlan, weighting: Weighting) -> dict[BlockKey, Tensors]:
    """The weighted mean of each GLOBAL and GROUP copy over the updates that hold it, in the order of ``updates``."""
    totals: dict[str, float] = {}
    for update in updates:
        for owner, count in update.weights.items():
            totals[owner] = totals.get(owner, 0.0) + count
    sums: dict[BlockKey, Tensors] = {}
    weights: dict[BlockKey, float] = {}
    dtypes: dict[BlockKey, dict[str, torch.dtype]] = {}
    for update in updates:
        for key, tensors in update.blocks.items():
            scope = plan.blocks[key.block].scope
            if scope not in (Scope.GLOBAL, Scope.GROUP):
                continue
            weight = weight_of(update, key, scope, weighting, totals)
            dtypes[key] = {name: tensor.dtype for name, tensor in tensors.items()}
            total = sums.setdefault(key, {n: torch.zeros_like(t, dtype=torch.float64) for n, t in tensors.items()})
            for name, tensor in tensors.items():
                total[name].add_(tensor.to(torch.float64), alpha=weight)
            weights[key] = weights.get(key, 0.0) + weight
    return {
        key: {name: mean_of(total, weights[key], dtypes[key][name]) for name, total in tensors.items()}
        for key, tensors in sums.items()
    }


def mean_of(total: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
    """A weighted sum over its weight; of whole numbers, such as a counter of batches, the nearest one."""
    mean = total / weight
    return (mean if dtype.is_floating_point else mean.round()).to(dtype)


def aggregate(updates: Sequence[Update], plan: SharingPlan) -> Update:
    """What secure aggregation shows of them: the plain mean of each block, the sum of each payload, nobody's own."""
    payloads: dict[str, Tensors] = {}
    weights: dict[str, float] = {}
    for update in updates:
        for payload, tensors in update.payloads.items():
            total = payloads.setdefault(payload, {})
            for name, tensor in tensors.items():
                total[name] = total.get(name, torch.zeros((), dtype=torch.float64)) + tensor.to(torch.float64)
        for owner, count in update.weights.items():
            weights[owner] = weights.get(owner, 0.0) + count
    sums = {p: {name: tensor.to(torch.float32) for name, tensor in part.items()} for p, part in payloads.items()}
    return Update("all", updates[0].round, merge(updates, plan, "equal"), weights, sums)
