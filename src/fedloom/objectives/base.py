"""The one shape that all objectives have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext


@dataclass(frozen=True)
class Losses:
    """What is minimised for each example, and the named terms that it is made of."""

    total: Tensor  # (batch,)
    terms: Mapping[str, Tensor]  # each (batch,)


class Objective(Protocol):
    """A pure function of model, batch, noise, what the silo received this round, and the round."""

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """The standard normal noise that one example needs, by name; the engine draws it from the named streams."""
        ...

    def __call__(
        self,
        model: nn.Module,
        batch: Batch,
        noise: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        context: RoundContext,
    ) -> Losses:
        """Evaluate on a batch; ``received`` maps parameter names to their values at the start of the round."""
        ...
