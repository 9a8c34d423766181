"""A silo's optimiser: torch's own update rules, called without the bookkeeping of its Optimizer class.

That class costs a small model's step 0.2 ms, and its first use loads torch's compiler, which takes a second.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedloom.methods.base import OptimizerPlan

EPSILON = 1e-8


class LocalOptimizer:
    """Adam or SGD over some parameters; fused, so that a step passes over weights and moments once."""

    def __init__(self, plan: OptimizerPlan, parameters: Sequence[nn.Parameter]) -> None:
        self._plan = plan
        self._parameters: list[Tensor] = list(parameters)
        self.state: dict[Tensor, dict[str, Tensor]] = {parameter: {} for parameter in parameters}
        if plan.name == "adam":
            for parameter, moments in self.state.items():
                moments["step"] = torch.zeros(())
                moments["exp_avg"], moments["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Move the parameters, given one gradient for each."""
        parameters, moved, plan = self._parameters, list(gradients), self._plan
        if plan.name == "sgd":
            sgd(
                parameters,
                moved,
                momentum_buffer_list=[None] * len(parameters),
                fused=True,
                weight_decay=0.0,
                momentum=0.0,
                lr=plan.learning_rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        moments = [self.state[parameter] for parameter in parameters]
        adam(
            parameters,
            moved,
            exp_avgs=[moment["exp_avg"] for moment in moments],
            exp_avg_sqs=[moment["exp_avg_sq"] for moment in moments],
            max_exp_avg_sqs=[],
            state_steps=[moment["step"] for moment in moments],
            fused=True,
            amsgrad=False,
            beta1=plan.betas[0],
            beta2=plan.betas[1],
            lr=plan.learning_rate,
            weight_decay=0.0,
            eps=EPSILON,
            maximize=False,
        )
