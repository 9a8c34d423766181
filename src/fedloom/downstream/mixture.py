"""The mixture of a silo's own classifier with a common one, and how its weight lambda is chosen.

Di Salvo, Nguyen, Ledig, MICCAI 2025 (arXiv 2507.02671), equation 4: p(y|x) = lambda p_local(y|x) + (1 - lambda)
p_global(y|x), with lambda of 0, 0.1, ..., 1 chosen on each silo's validation records. The authors' code chooses one
lambda for everybody, for which exact counts leave the silos: whoever asks for it gives up differential privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.outline import in_outline
from fedloom.sharing.plan import Payload

GRID = torch.linspace(0, 1, 11, dtype=torch.float64)
SWEEPS = 2  # over the classes, where each has a lambda of its own


@dataclass(frozen=True, eq=False)
class Answers:
    """What two classifiers say of the same labelled records, as probabilities."""

    __repr__ = in_outline

    local: Tensor  # (records, classes)
    common: Tensor
    truth: Tensor  # (records,)
    importance: Tensor | float = 1.0  # of each record

    def mixed(self, weights: Tensor) -> Tensor:
        """The mixture; ``weights`` holds one lambda, or one for each class."""
        found = weights * self.local + (1 - weights) * self.common
        return found / found.sum(dim=1, keepdim=True)

    def hits(self) -> Tensor:
        """How many records the mixture gets right, for each lambda of the grid."""
        right = [self.mixed(weight).argmax(dim=1) == self.truth for weight in GRID]
        return torch.stack(right).sum(dim=1).to(torch.float64)

    def worth(self, weights: Tensor) -> tuple[float, float]:
        """The number of hits; where that is equal, the truth's likelihood decides."""
        found = self.mixed(weights)
        likely = found[torch.arange(len(found)), self.truth].clamp_min(1e-12).log()
        hits = (found.argmax(dim=1) == self.truth).double()
        return round((self.importance * hits).sum().item(), 6), (self.importance * likely).sum().item()

    def balanced(self) -> Answers:
        """The same where the records of a class together are as important as those of any other."""
        return replace(self, importance=1.0 / torch.bincount(self.truth)[self.truth].double())


def for_each_silo(silos: Sequence[Answers]) -> list[Tensor]:
    """The paper's: nothing leaves a silo."""
    return [GRID[max(range(len(GRID)), key=lambda i: silo.worth(GRID[i]))] for silo in silos]


def for_each_silo_by_class(silos: Sequence[Answers]) -> list[Tensor]:
    """By balanced accuracy: a silo whose records are mostly of one class would else trust itself for all of them."""
    return for_each_silo([silo.balanced() for silo in silos])


def for_all(silos: Sequence[Answers]) -> list[Tensor]:
    """The code's: the counts of hits are added up."""
    total = torch.stack([silo.hits() for silo in silos]).sum(dim=0)
    return [GRID[total.argmax()]] * len(silos)


def for_each_class(silos: Sequence[Answers]) -> list[Tensor]:
    """One lambda for each class of a silo, improved in turn; a class that no validation record has keeps the silo's."""
    return [_by_class(silo, start) for silo, start in zip(silos, for_each_silo(silos), strict=True)]


def _by_class(silo: Answers, start: Tensor) -> Tensor:
    weights = start.repeat(silo.local.shape[1])
    for _ in range(SWEEPS):
        for label in torch.unique(silo.truth).tolist():
            tried = weights.repeat(len(GRID), 1)
            tried[:, label] = GRID
            weights = max((weights, *tried), key=silo.worth)  # the first of equals: what is there stays
    return weights


CHOICES: dict[str, Callable[[Sequence[Answers]], list[Tensor]]] = {
    "silo": for_each_silo,
    "balanced": for_each_silo_by_class,
    "shared": for_all,
    "class": for_each_class,
}

# What a choice lets out. Noise on the counts alone would not guard the training records behind a silo's own head.
LEAVES: dict[str, tuple[Payload, ...]] = {
    "shared": (
        Payload(
            "validation hits",
            "for one lambda for all, exact counts of the validation records that its mixture gets right leave each "
            "silo, one for every lambda tried; they depend on its training records too",
            {"hits": (len(GRID),)},
        ),
    )
}
