"""How parameters move, for one silo as for a stack of them: torch's own rules, without its Optimizer class.

That class costs a small model's step 0.2 ms, and its first use loads torch's compiler, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import OptimizerRule

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
EPSILON = 1e-8
NORM_EPSILON = 1e-6  # as torch's clip_grad_norm_ has it


def gradients_of_mean(
    values: Tensor, mask: Tensor, parameters: Sequence[Tensor], whole: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Gradients of the mean of per-example losses; rows whose mask is 0 do not exist.

    ``whole`` is the mask of all rows, where ``values`` are of some: then what these add to the gradient of the mean.

    Values and mask have shape (batch,), or (silos, batch) where the parameters are stacks of as many silos. A parameter
    that the losses do not reach gets zeros.
    """
    # One silo's losses do not depend on another's parameters, so that all silos share one backward pass.
    # Not by ``grad_outputs``, with which torch loads its compiler, a second of every start.
    shares = mask / (mask if whole is None else whole).sum(dim=-1, keepdim=True)
    return torch.autograd.grad((values * shares).sum(), parameters, allow_unused=True, materialize_grads=True)


class LocalOptimizer:
    """A phase's optimiser for the silos of a stack; ``parameters`` are stacks, moved in place."""

    def __init__(self, rule: OptimizerRule, parameters: Mapping[str, Tensor], compiled: bool = False) -> None:
        self._rule, self._parameters = rule, parameters
        some = next(iter(parameters.values()))
        self._counted = rule.name != "sgd"
        kinds = ADAM_MOMENTS if self._counted else ("momentum_buffer",) if rule.momentum else ()
        self._moments = {kind: {n: torch.zeros_like(p) for n, p in parameters.items()} for kind in kinds}
        # Silos that begin afresh every round count alike; those that keep their moments have counts of their own.
        self._counts = torch.zeros(len(parameters), len(some) if rule.keep else 1, device=some.device)
        self._compiled_adam = torch.compile(adam_of_stack, dynamic=False) if compiled else None
        # A recorded step holds on to numbers, but reads tensors anew.
        follows = rule.scheduled and some.device.type != "cpu"
        self._rate: float | Tensor = some.new_tensor(rule.learning_rate) if follows else rule.learning_rate
        self._rows: dict[int, tuple[list[list[Tensor]], list[Tensor]]] = {}

    def begin(self, context: RoundContext) -> None:
        """A new round, with the rate that is due in it."""
        if isinstance(self._rate, Tensor):
            self._rate.fill_(self._rule.rate(context))
        else:
            self._rate = self._rule.rate(context)

    def reset(self) -> None:
        """As before the first step."""
        for tensors in self._moments.values():
            torch._foreach_zero_(list(tensors.values()))
        self._counts.zero_()

    def load(self, position: int, kept: Mapping[str, Tensor]) -> None:
        """Take over what a silo kept: parameter/moment -> value."""
        for number, name in enumerate(self._parameters):
            for kind, tensors in self._moments.items():
                tensors[name][position] = kept[f"{name}/{kind}"]
            if self._counted:
                self._counts[number, position] = kept[f"{name}/step"]

    def kept(self, silos: int) -> dict[str, Tensor]:
        """What the first ``silos`` silos keep, by parameter/moment, on the host."""
        found = {f"{n}/{k}": t[:silos].cpu() for k, tensors in self._moments.items() for n, t in tensors.items()}
        if self._counted:
            found |= {f"{n}/step": self._counts[i, :silos].cpu() for i, n in enumerate(self._parameters)}
        return found

    @torch.no_grad()
    def step(self, silos: int, gradients: Sequence[Tensor]) -> None:
        """Move the parameters of the first ``silos`` silos."""
        if self._rule.clip_norm:
            gradients = shortened(gradients, self._rule.clip_norm)
        if self._compiled_adam is not None and self._counted:
            self._compiled_step(self._compiled_adam, silos, list(gradients))
            return
        if len(self._listed(silos)[1]) > len(gradients):
            gradients = [row for gradient in gradients for row in gradient]
        elif silos == 1:
            gradients = [gradient[0] for gradient in gradients]
        self._move(silos, gradients)

    @torch.no_grad()
    def step_alone(self, gradients: Iterable[Tensor]) -> None:
        """Move the parameters of the first silo, given gradients without the dimension of silos."""
        if self._rule.clip_norm or self._compiled_adam is not None:
            self.step(1, [gradient.unsqueeze(0) for gradient in gradients])
        else:  # a view for each gradient, made and unmade, is a tenth of a small model's step
            self._move(1, gradients)

    def _move(self, silos: int, gradients: Iterable[Tensor]) -> None:
        (parameters, *moments), counts = self._listed(silos)
        gradients = [
            g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
            for p, g in zip(parameters, gradients, strict=True)
        ]
        if self._counted:
            self._adam(parameters, gradients, moments[0], moments[1], counts)
        else:
            self._sgd(parameters, gradients, moments[0] if moments else None)

    def _listed(self, silos: int) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Parameters and moments of the first ``silos`` silos, and their counts: silo by silo where these differ."""
        if silos not in self._rows:
            lists = [[t[:silos] for t in tensors.values()] for tensors in (self._parameters, *self._moments.values())]
            counts = list(self._counts[:, 0])
            if self._rule.keep or silos == 1:
                lists = [[row for tensor in tensors for row in tensor] for tensors in lists]
                counts = [count for row in self._counts for count in row[:silos]]
            self._rows[silos] = lists, counts
        return self._rows[silos]

    def _adam(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        counts: list[Tensor],
    ) -> None:
        adam(
            parameters,
            gradients,
            exp_avgs=first,
            exp_avg_sqs=second,
            max_exp_avg_sqs=[],
            state_steps=counts,
            fused=True,  # a step passes over weights and moments once
            decoupled_weight_decay=self._rule.name == "adamw",
            amsgrad=False,
            beta1=self._rule.betas[0],
            beta2=self._rule.betas[1],
            lr=self._rate,
            weight_decay=self._rule.weight_decay,
            eps=EPSILON,
            maximize=False,
        )

    def _sgd(self, parameters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor] | None) -> None:
        if self._rule.weight_decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=self._rule.weight_decay))
        if momenta is not None:
            torch._foreach_mul_(momenta, self._rule.momentum)
            torch._foreach_add_(momenta, gradients)
            gradients = momenta
        if isinstance(self._rate, Tensor):
            torch._foreach_sub_(parameters, torch._foreach_mul(gradients, self._rate))
        else:
            torch._foreach_add_(parameters, gradients, alpha=-self._rate)

    def _compiled_step(self, compiled: Callable[..., None], silos: int, gradients: list[Tensor]) -> None:
        lists = [[t[:silos] for t in tensors.values()] for tensors in (self._parameters, *self._moments.values())]
        steps = self._counts[0, :silos] if self._rule.keep else self._counts[0]
        with many_programs():
            compiled(
                lists[0], gradients, lists[1], lists[2], steps, self._rate, self._rule.betas, self._rule.weight_decay
            )
        self._counts[1:] = self._counts[0]


def adam_of_stack(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    counts: Tensor,
    rate: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
) -> None:
    """Adam in place, with one count of steps for each silo or for all: compiled, a single pass over the memory.

    Torch's own wants a list of tensors with a count each, and no compiler sees into its kernel. Where the counts of
    silos differ, a stack would fall into as many tensors; this formula takes it whole.
    """
    counts += 1
    correction_first, correction_second = 1 - betas[0] ** counts, 1 - betas[1] ** counts
    for parameter, gradient, m, v in zip(parameters, gradients, first, second, strict=True):
        column = (-1, *[1] * (parameter.dim() - 1))
        m.lerp_(gradient, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        deviation = (v / correction_second.reshape(column)).sqrt() + EPSILON
        if weight_decay:
            parameter.mul_(1 - rate * weight_decay)
        parameter.sub_(rate * (m / correction_first.reshape(column)) / deviation)


def shortened(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Each silo's gradient, over all parameters together, at most so long; all tensors are stacks of silos."""
    # By dimensions, because to flatten what does not lie in their order would be to copy it.
    dimensions = (tuple(range(1, g.dim() + 1)) for g in gradients)
    norms = torch.stack(
        [torch.linalg.vector_norm(g.unsqueeze(-1), dim=d) for g, d in zip(gradients, dimensions, strict=True)]
    )
    factors = (limit / (torch.linalg.vector_norm(norms, dim=0) + NORM_EPSILON)).clamp(max=1.0)
    return [g * factors.reshape(-1, *[1] * (g.dim() - 1)) for g in gradients]


def many_programs() -> AbstractContextManager[Any]:
    """Each phase of each stack is a program of its own, but the compiler counts them as one that keeps changing."""
    patch: AbstractContextManager[Any] = torch._dynamo.config.patch(recompile_limit=256)
    return patch
