"""Groups by the branch that explains a silo's records best: IFCA, with restarts.

After Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020: in each
step every silo takes the branch of the least loss, and a branch goes on with what its silos answer. A branch is a
subspace, and the loss of a record the part of its vector that lies outside of it, between 0 and 1. A silo answers for
all branches at once, with its second moments times their bases. By that the server knows the losses of each, and the
branch's next basis: the power method, which stands noise (Hardt, Price, "The Noisy Power Method", NeurIPS 2014).
Under a mechanism both are noisy, so that the choice is the least of noisy losses, and rests on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.discovery.clustering import Found
from fedloom.discovery.features import EMBEDDING, FourierFeatures
from fedloom.federation.records import Batch, Records
from fedloom.outline import in_outline
from fedloom.privacy.payload_sums import BoundedSum, Query

RANK = 4  # directions of a branch
QUESTIONS = 4  # that each silo answers, the first of them before there are branches
RESTARTS = 4  # where nothing has to be paid for them
ANSWER = "explained"
TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Explained:
    """What a record adds to its silo's answer: its vector times how far it lies along each direction asked for."""

    __repr__ = in_outline

    features: FourierFeatures
    bases: Tensor  # (values, directions)

    @property
    def scale(self) -> float:
        """By which what a record adds has at most length 1, whatever is asked."""
        return 1 / max(float(torch.linalg.matrix_norm(self.bases, 2)), TINY)

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """One matrix for each record."""
        rows = self.features(model, batch)[EMBEDDING]
        return {ANSWER: rows.unsqueeze(2) * (rows @ (self.bases * self.scale).to(rows.dtype)).unsqueeze(1)}


@dataclass(frozen=True)
class OneOfSeveral:
    """An answer to one of all questions, which cost together what a single one would: each has that much more noise."""

    statistic: BoundedSum

    @property
    def bound(self) -> float:
        """That of each."""
        return self.statistic.bound

    @property
    def problem(self) -> str:
        """Nothing: noise covers what is sent."""
        return self.statistic.problem

    def check(self, records: Records, model: nn.Module) -> None:
        """What each is checked for."""
        self.statistic.check(records, model)

    def value(self, query: Query) -> dict[str, Tensor]:
        """Normal noise of so many releases, each chosen by what the last has shown, adds up as that of one."""
        noise = query.noise and replace(query.noise, multiplier=query.noise.multiplier * math.sqrt(QUESTIONS))
        return self.statistic.value(replace(query, noise=noise))


def first_bases(values: int, groups: int, restarts: int, generator: torch.Generator) -> Tensor:
    """What is asked before there are branches: about as many directions at random."""
    return torch.randn(values, groups * restarts * RANK, generator=generator, dtype=torch.float64)


Ask = Callable[[Tensor], list[Tensor]]  # bases -> each silo's mean second moments times them


def search(ask: Ask, first: Tensor, groups: int, restarts: int, generator: torch.Generator) -> Tensor:
    """The loss of each silo under each branch, (silos, groups), of the restart that explains all of them best."""
    own = [_orthonormal(answer) for answer in ask(first)]
    bases = torch.stack([torch.stack([own[i] for i in _apart(own, groups, generator)]) for _ in range(restarts)])
    for left in reversed(range(QUESTIONS - 1)):
        shape = (restarts, groups, -1, RANK)
        asked = bases.permute(2, 0, 1, 3).flatten(1)
        answers = torch.stack([answer.reshape(len(answer), *shape[:2], RANK) for answer in ask(asked)])
        answers = answers.permute(0, 2, 3, 1, 4)  # (silos, restarts, groups, values, directions)
        losses = 1 - (bases * answers).sum(dim=(3, 4))
        if left:
            bases = _moved(bases, answers, losses.argmin(dim=2))
    best = int(losses.min(dim=2).values.sum(dim=0).argmin())
    return losses[:, best]


def _orthonormal(matrix: Tensor) -> Tensor:
    """The directions in which most of a matrix lies."""
    left: Tensor = torch.linalg.svd(matrix, full_matrices=False).U
    return left[:, :RANK]


def _apart(own: list[Tensor], groups: int, generator: torch.Generator) -> list[int]:
    """Silos to begin with: one at random, then always the one that is most unlike all before."""
    near = torch.tensor([[float((one.T @ other).square().sum()) for other in own] for one in own])
    chosen = [int(torch.randint(len(own), (1,), generator=generator))]
    while len(chosen) < groups:
        chosen.append(int(near[chosen].max(dim=0).values.argmin()))
    return chosen


def _moved(bases: Tensor, answers: Tensor, labels: Tensor) -> Tensor:
    """Each branch where the silos that took it lead; one that nobody took stays."""
    moved = bases.clone()
    for restart, group in np.ndindex(*bases.shape[:2]):
        members = labels[:, restart] == group
        if members.any():
            moved[restart, group] = _orthonormal(answers[members, restart, group].sum(dim=0))
    return moved


def found_by_loss(losses: Tensor, noises: Tensor, units: Tensor) -> Found:
    """Groups by the least loss; ``noises`` are the standard deviations of the noise in each silo's losses.

    A mean of values between 0 and 1 varies by no more than that of coins.
    """
    best, order = losses.argmin(dim=1).tolist(), list[int]()
    order += dict.fromkeys(best)
    shown = losses[:, order]
    coins = losses.min(dim=1).values.clamp(0, 1)
    error = (noises.square() + coins * (1 - coins) / units).sqrt().clamp_min(TINY)
    behind = shown - shown.min(dim=1, keepdim=True).values
    likely = torch.exp(-(behind / error.unsqueeze(1)).square() / 4)  # the difference of two has twice the variance
    places = torch.nn.functional.pad(shown, (0, 1))[:, :2]
    return Found(
        tuple(order.index(label) for label in best),
        (likely / likely.sum(dim=1, keepdim=True)).numpy(),
        len(order),
        0.0,
        places.numpy(),
        tuple(error.tolist()),
    )
