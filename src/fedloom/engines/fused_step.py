"""One step of many silos at once: the objective vmapped over a stack of weights, then one optimiser over the stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fedloom.engines.batches import gathered
from fedloom.engines.fused_stack import Stack
from fedloom.engines.optimizers import gradients_of_mean, many_programs
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Phase
from fedloom.objectives.base import Losses, Step
from fedloom.objectives.lending import Lending, batch_of_columns
from fedloom.privacy.per_example import Watch
from fedloom.sharing.plan import Tensors

P = ParamSpec("P")
R = TypeVar("R")
Precision = Literal["float32", "tf32", "bf16"]


class WatchedContext:
    """A round's context that notices what an objective looks at: a recorded program could not follow it."""

    def __init__(self, context: RoundContext) -> None:
        self._context = context
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._context, name)


@dataclass(frozen=True, eq=False)
class Batching:
    """How a function of one silo becomes one of a stack of silos, each argument with a leading dimension of silos."""

    model: nn.Module
    context: Callable[[], RoundContext]  # the round's, asked for anew in every step
    precision: Precision
    compiled: bool = False
    looped: bool = False  # silo after silo, for layers that do not batch well over them

    def __call__(self, one: Callable[P, R]) -> Callable[P, R]:
        """The function for all silos at once; what it gives is float32 if ``one`` says so."""
        batched = looped(one) if self.looped else vmap(one, randomness="error")
        device = next(self.model.parameters()).device

        def evaluate(*arguments: P.args, **named: P.kwargs) -> R:
            with autocast(device, self.precision):
                return batched(*arguments, **named)

        return evaluate

    def quickened(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, compiled when it is first called, where this is asked for."""
        if not self.compiled:
            return function
        fast = torch.compile(function, dynamic=False)

        def quick(*arguments: P.args, **named: P.kwargs) -> R:
            with many_programs():
                return fast(*arguments, **named)

        return quick


def looped(one: Callable[P, R]) -> Callable[P, R]:
    """What ``vmap`` gives, by calls of ``one``."""

    def each(*arguments: P.args, **named: P.kwargs) -> R:
        silos = len(tree_leaves((arguments, named))[0])
        own = (tree_map(itemgetter(silo), (arguments, named)) for silo in range(silos))
        results = [one(*arguments, **named) for arguments, named in own]
        stacked: R = tree_map(lambda *parts: torch.stack(parts), *results)
        return stacked

    return each


def batched_losses(
    batching: Batching, phase: Phase
) -> Callable[[Tensors, Tensors, Tensors, Tensors], tuple[Tensor, Tensors]]:
    """(weights, columns, noise, received) -> losses (silos, batch), terms."""
    lending, context = Lending(batching.model, phase.objective), batching.context

    def one(weights: Tensors, columns: Tensors, noise: Tensors, received: Tensors) -> tuple[Tensor, Tensors]:
        return in_float32(lending.losses(weights, Step(batch_of_columns(columns), noise, received, context())))

    return batching(one)


def tapped_losses(
    batching: Batching, phase: Phase, watched: Sequence[str]
) -> Callable[[Tensors, Tensors, Tensors, Tensors, Sequence[Tensor]], tuple[Tensor, Tensors, list[Tensor]]]:
    """Those losses with taps at the outputs of the layers of ``watched`` parameters, and what went into these."""
    lending, watch, context = Lending(batching.model, phase.objective), Watch(batching.model, watched), batching.context
    watch.__enter__()  # once and for all: a compiler does not follow hooks that come and go

    def one(
        weights: Tensors, columns: Tensors, noise: Tensors, received: Tensors, taps: Sequence[Tensor]
    ) -> tuple[Tensor, Tensors, list[Tensor]]:
        step = Step(batch_of_columns(columns), noise, received, context())
        losses, inputs = watch.tapped(lambda: lending.losses(weights, step), taps)
        return *in_float32(losses), [x.detach().float() for x in inputs]

    return batching(one)


def written_out(batching: Batching, phase: Phase) -> Callable[[Tensors, Tensors, Tensors, Tensors, Tensors], Tensors]:
    """(trained weights, other weights, columns, noise, received) -> every example's gradient (silos, batch, *shape)."""
    lending, context = Lending(batching.model, phase.objective), batching.context

    def one(trained: Tensors, others: Tensors, columns: Tensors, noise: Tensors, received: Tensors) -> Tensors:
        step = Step(batch_of_columns(columns), noise, received, context())
        return {name: rows.float() for name, rows in lending.gradients(trained, others, step).items()}

    return batching(one)


def in_float32(losses: Losses) -> tuple[Tensor, Tensors]:
    """Losses and terms, whatever they were computed in."""
    return losses.total.float(), {name: term.float() for name, term in losses.terms.items()}


Evaluate = Callable[[Tensors, Tensor, Tensor, Tensors, Tensors], tuple[Tensor, Tensor]]


def evaluation(stack: Stack, phase: Phase, batching: Batching) -> Evaluate:
    """(weights, rows, mask, noise, received) -> losses (silos, batch), and the mean of each term (terms, silos)."""
    batched = batched_losses(batching, phase)
    decode = stack.table.records.modality.decode  # asked for here: a compiler does not follow how it is found

    def evaluate(
        weights: Tensors, index: Tensor, mask: Tensor, noise: Tensors, received: Tensors
    ) -> tuple[Tensor, Tensor]:
        losses, terms = batched(weights, gathered(stack.table.records, decode, index, mask), noise, received)
        values = torch.stack([losses.detach(), *(term.detach() for term in terms.values())])
        return losses, (values * mask).sum(dim=-1) / mask.sum(dim=-1)

    return batching.quickened(evaluate)


# (weights, rows, mask, noise, received) -> gradients of the trained ones, each (silos, *shape); means (terms, silos)
Gradients = Callable[[Tensors, Tensor, Tensor, Tensors, Tensors], tuple[Sequence[Tensor], Tensor]]


def gradients_of_stack(stack: Stack, phase: Phase, batching: Batching, trained: Sequence[str]) -> Gradients:
    """Of the mean loss of each silo's batch, in one pass forwards and one backwards; and the mean of each term."""
    evaluate = evaluation(stack, phase, batching)

    def gradients(
        weights: Tensors, index: Tensor, mask: Tensor, noise: Tensors, received: Tensors
    ) -> tuple[Sequence[Tensor], Tensor]:
        leaves = {name: weights[name].detach().requires_grad_() for name in trained}
        losses, means = evaluate({**weights, **leaves}, index, mask, noise, received)
        return gradients_of_mean(losses, mask, list(leaves.values())), means

    return gradients


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """In which a model computes in that precision."""
    if precision != "bf16":
        return nullcontext()
    # Weights stay float32; their casts must not be cached, because a recorded program has to make them anew.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


@contextmanager
def matrix_precision(precision: Precision) -> Iterator[None]:
    """TF32 where asked for and nowhere else: merging and evaluation must not meet it."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def laid_out(like: Tensor, silos: int) -> Tensor:
    """Zeros for a stack, each silo's part with the shape of ``like``, and with its strides if those are dense.

    Gradients of linear layers come out transposed; weights and moments that lie the same way need no copy of them.
    """
    part = torch.empty_like(like)  # keeps dense strides, replaces others
    strides = (part.numel(), *part.stride())
    return torch.empty_strided((silos, *part.shape), strides, dtype=part.dtype, device=part.device).zero_()
