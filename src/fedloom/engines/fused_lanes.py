"""Silos in lanes: each takes its step by itself, several side by side on streams of a GPU.

A stack of weights is worth its copies where one silo's step is too small to fill a GPU. A large convolutional network
is not: its kernels would have to become matrices first, and what those are multiplied with is nine times the images.
In lanes its convolutions stay convolutions, and while one silo's kernels run out another's begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedloom.engines.batches import gathered
from fedloom.engines.fused_stack import Stack
from fedloom.engines.fused_step import Batching, autocast, in_float32, laid_out
from fedloom.methods.base import Phase
from fedloom.objectives.base import Step, slices_of
from fedloom.objectives.lending import Lending, batch_of_columns
from fedloom.sharing.plan import Tensors

KERNEL = 4  # dimensions of a convolution's


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


class LanedGradients:
    """What :func:`fused_step.gradients_of_stack` gives, silo by silo."""

    def __init__(
        self, stack: Stack, phase: Phase, batching: Batching, trained: Sequence[str], lanes: Lanes, room: Tensors
    ) -> None:
        """``room`` is where the gradients of a step are put: stacks, by the names of weights."""
        self._records, self._decode = stack.table, stack.table.records.modality.decode
        self._batching, self._device, self._lanes = batching, stack.device, lanes
        self._lending = Lending(batching.model, phase.objective)
        self._trained, self._room, self._at_once = tuple(trained), room, phase.at_once
        halved = _in_products(batching.model) if batching.precision == "bf16" else set()
        self._halved = {name: _rounded_room(room[name]) for name in trained if name in halved}
        self._mean_losses = batching.quickened(self._of_one)

    def __call__(
        self, weights: Tensors, index: Tensor, mask: Tensor, noise: Tensors, received: Tensors
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Gradients of the trained weights, each (silos, *shape), and the mean of each term (terms, silos)."""
        silos = len(index)
        lent = {**weights, **self._rounded(weights, silos)}
        columns = gathered(self._records.records, self._decode, index, mask)
        means: list[Tensor] = [mask] * silos  # so many places, each of which a lane fills
        pieces = (partial(self._step, silo, (lent, columns, noise, received), means) for silo in range(silos))
        self._lanes.each(pieces)
        return [self._room[name][:silos] for name in self._trained], torch.stack(means, dim=1)

    def _rounded(self, weights: Tensors, silos: int) -> Tensors:
        """What goes into products, in their precision, of all silos at once: by autocast it would be one by one."""
        found = {name: tensor[:silos] for name, tensor in self._halved.items()}
        if found:
            _copied(list(found.values()), [weights[name].detach() for name in found])
        return found

    def _step(self, silo: int, inputs: Sequence[Tensors], means: list[Tensor]) -> None:
        weights, columns, noise, received = ({n: tensor[silo] for n, tensor in each.items()} for each in inputs)
        leaves = [weights[name].detach().requires_grad_() for name in self._trained]
        lent = {**weights, **dict(zip(self._trained, leaves, strict=True))}
        shares = columns["mask"] / columns["mask"].sum()
        slopes: tuple[Tensor, ...] = ()
        for rows in slices_of(len(shares), self._at_once):
            mine, drawn = ({name: tensor[rows] for name, tensor in each.items()} for each in (columns, noise))
            loss, part = self._mean_losses(lent, mine, drawn, received, shares[rows])
            found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            slopes = torch._foreach_add(slopes, found) if slopes else found
            means[silo] = part if rows.start == 0 else means[silo] + part
        _copied([self._room[name][silo] for name in self._trained], slopes)

    def _of_one(
        self, weights: Tensors, columns: Tensors, noise: Tensors, received: Tensors, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What some rows of a silo's batch add to its mean loss, and to that of each term."""
        with autocast(self._device, self._batching.precision):
            step = Step(batch_of_columns(columns), noise, received, self._batching.context())
            losses, terms = in_float32(self._lending.losses(weights, step))
        values = torch.stack([losses.detach(), *(term.detach() for term in terms.values())])
        return (losses * shares).sum(), (values * shares).sum(dim=-1)


def _copied(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """In few passes: torch has one for many tensors, if all are of one type and lie as their targets do."""
    kinds: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kind = kinds.setdefault((source.dtype, source.stride() == target.stride()), ([], []))
        kind[0].append(target)
        kind[1].append(source)
    for into, these in kinds.values():
        torch._foreach_copy_(into, these)


def _rounded_room(stack: Tensor) -> Tensor:
    """Room for the same numbers in bfloat16, kernels with the channels of a place side by side."""
    one = torch.empty_like(stack[0], dtype=torch.bfloat16)
    if one.dim() == KERNEL and one.device.type == "cuda":
        one = one.to(memory_format=torch.channels_last)
    return laid_out(one, len(stack))


def _in_products(model: nn.Module) -> set[str]:
    """The names of weights that autocast would round wherever they are used."""
    products = nn.Linear | nn.Conv2d | nn.ConvTranspose2d
    modules = (name for name, module in model.named_modules() if isinstance(module, products))
    return {f"{name}.{kind}" for name in modules for kind in ("weight", "bias")}
