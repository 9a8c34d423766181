"""A term that holds a silo near what it received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fedloom.objectives.base import Losses, Objective, Step


@dataclass(frozen=True)
class Proximal:
    """objective + (weight / 2) |w - w_received|^2 over all parameters that were received, equal for every example."""

    objective: Objective
    weight: float

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """What the objective draws; the term itself draws nothing."""
        return self.objective.noise

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example: its mean over a batch has the gradient weight * (w - w_received) more."""
        losses = self.objective(model, step)
        received = step.received
        squares = [(p - received[name]).square().sum() for name, p in model.named_parameters() if name in received]
        distance = torch.stack(squares).sum() if squares else losses.total.new_zeros(())
        return Losses(
            losses.total + 0.5 * self.weight * distance,
            {**losses.terms, "distance": distance.expand(losses.total.shape)},
        )
