"""Silos in lanes: each takes its step by itself, several side by side on streams of a GPU.

A stack of weights is worth its copies where one silo's step is too small to fill a GPU. A large convolutional network
is not: its kernels would have to become matrices first, and what those are multiplied with is nine times the images.
In lanes its convolutions stay convolutions, and while one silo's kernels run out another's begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from fedloom.engines.batches import gathered
from fedloom.engines.fused_stack import Stack
from fedloom.engines.fused_step import Batching, Gradients, autocast, in_float32
from fedloom.methods.base import Phase
from fedloom.objectives.base import Step
from fedloom.objectives.lending import Lending, batch_of_columns
from fedloom.sharing.plan import Tensors


class Lanes:
    """Streams of a device that wait for what was begun before, and are waited for; on a CPU one after the other."""

    def __init__(self, device: torch.device, count: int) -> None:
        streams = range(count) if device.type == "cuda" else ()
        self._streams = [torch.cuda.Stream(device) for _ in streams]  # type: ignore[no-untyped-call]

    def each(self, pieces: Iterable[Callable[[], None]]) -> None:
        """All pieces of work, in turn to each lane."""
        if not self._streams:
            for piece in pieces:
                piece()
            return
        main = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(main)
        for number, piece in enumerate(pieces):
            with torch.cuda.stream(self._streams[number % len(self._streams)]):
                piece()
        for stream in self._streams:
            main.wait_stream(stream)


def gradients_in_lanes(
    stack: Stack, phase: Phase, batching: Batching, trained: Sequence[str], lanes: Lanes, room: Tensors
) -> Gradients:
    """As :func:`fused_step.gradients_of_stack`, silo by silo; ``room`` is where the gradients of a step are put."""
    lending, context, device = Lending(batching.model, phase.objective), batching.context, stack.device

    def mean_losses(weights: Tensors, columns: Tensors, noise: Tensors, received: Tensors) -> tuple[Tensor, Tensor]:
        with autocast(device, batching.precision):
            step = Step(batch_of_columns(columns), noise, received, context())
            losses, terms = in_float32(lending.losses(weights, step))
        shares = columns["mask"] / columns["mask"].sum()
        values = torch.stack([losses, *terms.values()])
        return (losses * shares).sum(), (values.detach() * shares).sum(dim=-1)

    quick = batching.quickened(mean_losses)
    decode = stack.table.records.modality.decode

    def gradients(
        weights: Tensors, index: Tensor, mask: Tensor, noise: Tensors, received: Tensors
    ) -> tuple[Sequence[Tensor], Tensor]:
        silos = len(index)
        columns = gathered(stack.table.records, decode, index, mask)
        found = {name: room[name][:silos] for name in trained}
        means: list[Tensor] = [mask] * silos  # of that many places, each of which a lane fills

        def one(silo: int) -> Callable[[], None]:
            def work() -> None:
                own = {name: tensor[silo] for name, tensor in weights.items()}
                leaves = {name: own[name].detach().requires_grad_() for name in trained}
                rest = (_of(silo, tensors) for tensors in (columns, noise, received))
                loss, means[silo] = quick({**own, **leaves}, *rest)
                slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
                torch._foreach_copy_([found[name][silo] for name in trained], slopes)

            return work

        lanes.each(map(one, range(silos)))
        return list(found.values()), torch.stack(means, dim=1)

    return gradients


def _of(silo: int, tensors: Tensors) -> Tensors:
    return {name: tensor[silo] for name, tensor in tensors.items()}


def lying_for_lanes(model: nn.Module, device: torch.device) -> None:
    """Kernels as a GPU's convolutions want them: the channels of a place side by side."""
    if device.type == "cuda":
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
