"""Whether the loss of one example depends on another: only without that does a bound on one record hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedloom.errors import ConfigError


class MixedExamplesError(ConfigError):
    """The loss of one example depends on another."""

    def __init__(self, objective: str, instead: str) -> None:
        super().__init__(
            f"objective '{objective}' mixes examples, so no bound on one record holds under DP-SGD; use {instead}"
        )


def require_separate_examples(losses: Callable[[Tensor], Tensor], x: Tensor, objective: str, instead: str) -> None:
    """Refuse an objective in which the loss of one example depends on another's record."""
    x = x.detach().clone().requires_grad_()
    for row, value in enumerate(losses(x)):
        (gradient,) = torch.autograd.grad(value, x, retain_graph=True, allow_unused=True, materialize_grads=True)
        if gradient[:row].any() or gradient[row + 1 :].any():
            raise MixedExamplesError(objective, instead)


def require_same_alone(together: Tensor, alone: Sequence[Tensor], objective: str, instead: str) -> None:
    """Refuse an objective whose losses change with the company of an example, be it by labels or groups."""
    if not torch.allclose(together, torch.cat(list(alone)), rtol=1e-4, atol=1e-5, equal_nan=True):
        raise MixedExamplesError(objective, instead)
