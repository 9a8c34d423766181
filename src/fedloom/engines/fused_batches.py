"""Batches and noise of a whole chunk of silos, from the same streams as the plain loop draws them silo by silo."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedloom.engines.fused_stack import Member, Stack, StackKind
from fedloom.federation.records import Records
from fedloom.methods.base import Phase
from fedloom.outline import in_outline
from fedloom.sharing.plan import Tensors
from fedloom.streams import streams_of

FIRST_STEPS = 16


@dataclass(frozen=True, eq=False)
class BatchWindow:
    """Some consecutive steps of the silos that take them."""

    __repr__ = in_outline

    index: Tensor  # (steps, silos, batch) rows of the stack's records
    mask: Tensor  # (steps, silos, batch) 0 where a row is padding
    noise: tuple[Tensors, ...]  # for each phase, each tensor (steps, silos, batch, *shape)
    usual: ClassVar[bool] = True  # every window has the same shapes

    def __len__(self) -> int:
        return len(self.index)

    @property
    def silos(self) -> int:
        """How many silos take these steps."""
        return self.index.shape[1]

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What a program's steps take, of all steps."""
        return self.index, self.mask, self.noise

    def step(self, number: int) -> tuple[Any, ...]:
        """What a program takes for one step."""
        noise = tuple({name: tensor[number] for name, tensor in part.items()} for part in self.noise)
        return self.index[number], self.mask[number], noise


class Stretches(ABC):
    """Which silos of a chunk are at work in which steps; they come in descending order of their number of steps."""

    def __init__(self, steps: list[int]) -> None:
        assert steps == sorted(steps, reverse=True), "those that finish first come last"
        self.steps = steps

    def counts(self) -> list[int]:
        """How many silos are at work, for each stretch of steps with a number of its own."""
        return sorted({self._active(step) for step in self.steps if step} | {len(self.steps)}, reverse=True)

    def stretches(self, longest: int) -> Iterator[tuple[int, int, int]]:
        """First step, end and number of silos at work, of at most ``longest`` steps each."""
        for first, last in itertools.pairwise(sorted({0, *self.steps})):
            for start in range(first, last, longest):
                yield start, min(start + longest, last), self._active(last)

    @abstractmethod
    def windows(self, longest: int) -> Iterator[Any]:
        """The steps in order, in windows of at most ``longest`` in which the same silos are at work."""

    def _active(self, step: int) -> int:
        return sum(steps >= step for steps in self.steps)


class Schedule(Stretches):
    """What the silos of a chunk do in a round."""

    def __init__(self, stack: Stack, members: Sequence[Member], round: int) -> None:
        super().__init__([member.steps for member in members])
        self._phases, self._batch, self._round = stack.kind.phases, stack.kind.local.batch_size, round
        self._seeds = [member.trainer.config.seed for member in members]
        sizes = [len(member.silo) for member in members]
        device = stack.device
        self._device = device
        offsets = stack.table.load([member.silo for member in members])
        facts = torch.tensor([[member.index for member in members], offsets, sizes], device=device)
        self._number, self._offset, self._size = facts.unbind()
        self._longest = max(sizes)
        epochs = torch.arange(
            max(
                math.ceil(steps / math.ceil(size / self._batch)) for steps, size in zip(self.steps, sizes, strict=True)
            ),
            device=device,
        )
        # Of each silo and epoch an order of as many places as the largest silo has. Those beyond a silo's own records
        # come last, and what comes before them is the order that the plain loop draws for this silo alone.
        self._orders = streams_of(self._seeds).permutation(
            "batches",
            self._longest,
            silo=self._number.unsqueeze(1),
            round=round,
            step=epochs,
            shorter=(self._longest - self._size).unsqueeze(1),
            device=device,
        )  # (silos, epochs, longest)

    def windows(self, longest: int) -> Iterator[BatchWindow]:
        """The steps in order, in windows of at most ``longest`` in which the same silos are at work."""
        for first, last, silos in self.stretches(longest):
            # The very first is short, so that a GPU has work to do while the rest is drawn.
            middle = FIRST_STEPS if first < FIRST_STEPS < last else first
            if middle > first:
                yield self._window(first, middle, silos)
            yield self._window(middle, last, silos)

    def _window(self, first: int, last: int, silos: int) -> BatchWindow:
        batch = self._batch
        step = torch.arange(first, last, device=self._device).unsqueeze(1)  # (steps, 1)
        size = self._size[:silos]
        per_epoch = (size + batch - 1) // batch
        # Each silo goes through its records at its own pace: step s is batch s % per_epoch of epoch s // per_epoch.
        position = (step % per_epoch).unsqueeze(2) * batch + torch.arange(batch, device=self._device)
        mask = position < size.unsqueeze(1)
        # The last batch of an epoch may be short. Its padding repeats the silo's last record: shapes stay fixed, every
        # row can be read, and the mask keeps it from counting.
        inside = torch.minimum(position, size.unsqueeze(1) - 1)
        place = (step // per_epoch).unsqueeze(2) * self._longest + inside  # (steps, silos, batch)
        order = self._orders[:silos].flatten(1)
        rows = torch.gather(order.expand(len(step), -1, -1), 2, place) + self._offset[:silos].unsqueeze(1)
        noise = tuple(self._noise(phase, step, silos) for phase in self._phases)
        return BatchWindow(rows, mask.to(torch.float32), noise)

    def _noise(self, phase: Phase, step: Tensor, silos: int) -> Tensors:
        return {
            name: streams_of(self._seeds[:silos])
            .normal(
                f"noise/{phase.name}/{name}",
                self._batch,
                math.prod(shape),
                silo=self._number[:silos],
                round=self._round,
                step=step,
                device=self._device,
            )
            .reshape(len(step), silos, self._batch, *shape)
            for name, shape in phase.objective.noise.items()
        }


def buffers(kind: StackKind, steps: int, silos: int, device: torch.device) -> tuple[Any, ...]:
    """Room for what so many steps take."""

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(steps, silos, kind.local.batch_size, *shape, dtype=dtype, device=device)

    noise = tuple({name: buffer(*shape) for name, shape in phase.objective.noise.items()} for phase in kind.phases)
    return buffer(dtype=torch.int64), buffer().fill_(1.0), noise  # no division by zero rows


def numbers_per_step(kind: StackKind) -> int:
    """How many numbers a window holds for each step of a silo."""
    noise = sum(math.prod(s) for phase in kind.phases for s in phase.objective.noise.values())
    return kind.local.batch_size * (noise + 3)  # index (two words) and mask


def gathered(records: Records, decode: Callable[[Tensor], Tensor], index: Tensor, mask: Tensor) -> Tensors:
    """The columns of a batch for each silo, by name, as models see them: ``decode`` is that of their modality."""
    # One copy of all silos' rows from the one table; values become floats only here, so that the table stays as small
    # as the records are stored.
    rows = {
        name: column.index_select(0, index.flatten()).reshape(*index.shape, *column.shape[1:])
        for name, column in records.columns().items()
    }
    return {**rows, "x": decode(rows["x"]), "mask": mask}
