"""The one shape that all objectives have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


class Objective(Protocol):
    """A pure function of a model and a step."""

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """The standard normal noise that one example needs, by name; the engine draws it from the named streams."""
        ...

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The losses of each example of the step's batch."""
        ...
