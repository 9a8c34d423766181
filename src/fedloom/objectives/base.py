"""The one shape that all objectives have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor, nn

from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext
from fedloom.outline import in_outline


@dataclass(frozen=True)
class Losses:
    """What is minimised for each example, and the named terms that it is made of."""

    __repr__ = in_outline

    total: Tensor  # (batch,)
    terms: Mapping[str, Tensor]  # each (batch,)


@dataclass(frozen=True)
class Step:
    """All that an objective may look at beside the model; engines make one inside their batched programs."""

    __repr__ = in_outline

    batch: Batch
    noise: Mapping[str, Tensor]  # what the objective asked for, each (batch, *shape)
    received: Mapping[str, Tensor]  # parameter name -> its value at the start of the round, of what came down
    context: RoundContext

    def passes(self, at_once: int) -> Iterator[Step]:
        """Itself, or parts of it of about equal size and no more than ``at_once`` rows, where that is not 0."""
        for rows in slices_of(len(self.batch.mask), at_once):
            noise = {name: tensor[rows] for name, tensor in self.noise.items()}
            yield replace(self, batch=self.batch.rows(rows), noise=noise)


def slices_of(count: int, at_once: int) -> list[slice]:
    """All rows in as few parts as it takes, of about equal size and no more than ``at_once`` rows; 0: one part."""
    rows = math.ceil(count / math.ceil(count / at_once)) if 0 < at_once < count else count
    return [slice(first, first + rows) for first in range(0, max(count, 1), max(rows, 1))]


class Objective(Protocol):
    """A pure function of a model and a step."""

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """The standard normal noise that one example needs, by name; the engine draws it from the named streams."""
        ...

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The losses of each example of the step's batch."""
        ...
