"""What the server sees of a round's updates: each of them or their sum, and of every shared block one merged copy."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fedloom.errors import FedloomWarning
from fedloom.outline import in_outline
from fedloom.sharing.plan import BlockKey, Scope, Seen, SharingPlan, Tensors
from fedloom.sharing.update import Update

Weighting = Literal["size", "equal-groups", "equal"]


def totals_of(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How many records the silos hold together, in all and of each group."""
    totals: dict[str, float] = {}
    for of_silo in counts:
        for owner, count in of_silo.items():
            totals[owner] = totals.get(owner, 0.0) + count
    return totals


def weight_of(update: Update, key: BlockKey, scope: Scope, weighting: Weighting, totals: Mapping[str, float]) -> float:
    """How much one silo's copy counts before normalisation.

    By size: the number of records behind the copy. Equal: every silo the same. With equal groups: a GLOBAL copy counts
    by its silo's share of each group's participating records, so that every group present weighs the same.
    """
    if weighting == "equal":
        return 1.0
    if scope is Scope.GLOBAL and weighting == "equal-groups":
        return sum(n / totals[group] for group, n in update.counts.items() if group != "all")
    return update.counts[key.owner if scope is Scope.GROUP else "all"]


class Sums(Protocol):
    """Forms the sums that the server sees: whoever forms them need show it nothing else.

    Totals of different silos may be added to each other, in any order.
    """

    def added(self, total: Tensor | None, copy: Tensor, weight: float) -> Tensor:
        """A total, or none so far, with one more silo's tensor in it; the total given may be overwritten."""
        ...

    def totals(self, weights: Tensor, copies: Tensor) -> Tensor:
        """For each row of ``weights``, which has a weight for each silo, the total of the stacked copies, flat."""
        ...

    def mean(self, total: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
        """What the server gets to see of a total: divided by the weight behind it."""
        ...


@dataclass(frozen=True)
class PlainSums:
    """In clear, in float64."""

    def added(self, total: Tensor | None, copy: Tensor, weight: float) -> Tensor:
        """The weighted tensor on top."""
        start = torch.zeros_like(copy, dtype=torch.float64) if total is None else total
        return start.add_(copy.to(torch.float64), alpha=weight)

    def totals(self, weights: Tensor, copies: Tensor) -> Tensor:
        """One matrix product."""
        return weights @ copies.to(torch.float64).reshape(len(copies), -1)

    def mean(self, total: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
        """Of whole numbers, such as a counter of batches, the nearest one."""
        return cast(total / weight, dtype)


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values as the silos sent them: whole numbers are rounded to the nearest."""
    return (values if dtype.is_floating_point else values.round()).to(dtype)


@dataclass(frozen=True)
class Copies:
    """The copies of one block that came in a round, in the order of their silos."""

    __repr__ = in_outline

    each: Sequence[Tensors]
    weights: Sequence[float]  # of the silos, before they are normalised
    known: Tensors  # the server's own before the round; empty where it had none
    sums: Sums = field(default_factory=PlainSums)

    def mean(self) -> Tensors:
        """The weighted mean."""
        totals: dict[str, Tensor | None] = dict.fromkeys(self.each[0])
        for tensors, weight in zip(self.each, self.weights, strict=True):
            totals = {name: self.sums.added(total, tensors[name], weight) for name, total in totals.items()}
        whole = sum(self.weights)
        return {n: self.sums.mean(t, whole, self.each[0][n].dtype) for n, t in totals.items() if t is not None}

    def middle(self, dropped: int) -> Tensors:
        """In each coordinate the mean of all values but the ``dropped`` smallest and the ``dropped`` largest."""
        found = {}
        for name, first in self.each[0].items():
            ordered = torch.stack([tensors[name] for tensors in self.each]).to(torch.float64).sort(dim=0).values
            found[name] = cast(ordered[dropped : len(self.each) - dropped].mean(dim=0), first.dtype)
        return found


@dataclass(frozen=True)
class Merge(ABC):
    """How the copies of a block become one: a frozen dataclass, whose fields are settings of ``server.merge``."""

    name: ClassVar[str]
    needs: ClassVar[Seen] = Seen.EACH  # of the copies: each of them, or their weighted sum
    weighted: ClassVar[bool] = False  # by ``sharing.weights``; else every silo counts once

    @property
    def least(self) -> int:
        """How many copies it takes; where fewer come, the block stays as it was."""
        return 1

    @property
    def title(self) -> str:
        """The setting, in words."""
        settings = [f"{each.name} = {getattr(self, each.name)}" for each in fields(self)]
        return f"server.merge = '{self.name}'" + f" with {', '.join(settings)}" * bool(settings)

    @abstractmethod
    def __call__(self, copies: Copies) -> Tensors:
        """One copy."""


@dataclass(frozen=True)
class Mean(Merge):
    """The weighted mean."""

    name = "mean"
    needs = Seen.SUM
    weighted = True

    def __call__(self, copies: Copies) -> Tensors:
        """Needs their sum alone."""
        return copies.mean()


@dataclass(frozen=True)
class Delivered:
    """What reaches the server step."""

    __repr__ = in_outline

    merged: Mapping[BlockKey, Tensors]  # one copy of each GLOBAL and GROUP block that enough silos sent
    updates: Sequence[Update]  # of single silos as far as they are shown, then their sum, as of a silo "all"


@dataclass(frozen=True)
class Aggregator:
    """Stands between the silos' updates and the server step, in every engine."""

    merge: Merge = field(default_factory=Mean)
    weighting: Weighting = "size"
    sums: Sums = field(default_factory=PlainSums)

    def delivered(
        self, updates: Sequence[Update], plan: SharingPlan, known: Mapping[BlockKey, Tensors], *, each: bool
    ) -> Delivered:
        """What the plan lets the server see, which has copies of its own; ``each``: of single silos blocks as well."""
        return Delivered(self.merged(updates, plan, known), self._shown(updates, plan, each))

    def merged(
        self, updates: Sequence[Update], plan: SharingPlan, known: Mapping[BlockKey, Tensors]
    ) -> dict[BlockKey, Tensors]:
        """One copy of each GLOBAL and GROUP block over the updates that hold it, in the order of ``updates``."""
        totals = totals_of([update.counts for update in updates])
        found: dict[BlockKey, list[tuple[Tensors, float]]] = {}
        for update in updates:
            for key, tensors in update.blocks.items():
                scope = plan.blocks[key.block].scope
                if scope in (Scope.GLOBAL, Scope.GROUP):
                    weight = weight_of(update, key, scope, self.weighting, totals)
                    found.setdefault(key, []).append((tensors, weight))
        merged: dict[BlockKey, Tensors] = {}
        for key, pairs in found.items():
            if len(pairs) < self.merge.least:
                warnings.warn(
                    f"block '{key}' stays as it was in round {updates[0].round}: {self.merge.title} needs "
                    f"{self.merge.least} copies, and {len(pairs)} came",
                    FedloomWarning,
                    stacklevel=2,
                )
                continue
            each, weights = zip(*pairs, strict=True)
            merged[key] = self.merge(Copies(each, weights, known.get(key, {}), self.sums))
        return merged

    def _shown(self, updates: Sequence[Update], plan: SharingPlan, blocks: bool) -> list[Update]:
        """Single updates without what is seen as a sum alone, and without blocks that nobody asks for; the sum."""
        hidden = {payload.name for payload in plan.payloads if payload.seen is Seen.SUM}
        own = [
            replace(
                update,
                blocks={
                    k: part for k, part in update.blocks.items() if blocks and plan.blocks[k.block].seen is Seen.EACH
                },
                payloads={name: part for name, part in update.payloads.items() if name not in hidden},
                counts={} if "records" in hidden else update.counts,
            )
            for update in updates
        ]
        if not hidden or not updates:
            return own
        totals: dict[str, dict[str, Tensor | None]] = {}
        for update in updates:
            for name in hidden & set(update.payloads):
                total = totals.setdefault(name, {})
                for part, tensor in update.payloads[name].items():
                    total[part] = self.sums.added(total.get(part), tensor, 1.0)
        payloads = {
            name: {
                part: self.sums.mean(total, 1.0, torch.float32) for part, total in parts.items() if total is not None
            }
            for name, parts in totals.items()
        }
        counts = totals_of([update.counts for update in updates])
        left = [update for update in own if update.blocks or update.payloads or update.counts]
        return [*left, Update("all", updates[0].round, {}, counts, payloads)]
