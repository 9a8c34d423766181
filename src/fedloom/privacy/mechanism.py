"""A privacy mechanism is a value: it sees one loss per example and gives back the gradients of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Mechanism(Protocol):
    """Stands between the losses of a phase that touches records and its optimiser."""

    @property
    def guarantee(self) -> str:
        """What may be said of the result, in words for a report."""
        ...

    def gradients(self, values: Tensor, mask: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gradients for ``parameters`` from per-example losses; rows whose mask is 0 do not exist.

        Values and mask have shape (batch,), or (silos, batch) where the parameters are stacks of as many silos.
        """
        ...


@dataclass(frozen=True)
class NoPrivacy:
    """The plain gradient of the mean over the batch."""

    @property
    def guarantee(self) -> str:
        """No promise at all."""
        return "no DP guarantee"

    def gradients(self, values: Tensor, mask: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradient of the masked mean; a parameter that the losses do not reach gets zeros."""
        # One silo's losses do not depend on another's parameters, so that all silos share one backward pass.
        # Not by ``grad_outputs``, with which torch loads its compiler, a second of every start.
        shares = mask / mask.sum(dim=-1, keepdim=True)
        return torch.autograd.grad((values * shares).sum(), parameters, allow_unused=True, materialize_grads=True)
