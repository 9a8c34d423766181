"""Which records and what noise each step of a round takes, for silos that train together as for one alone.

All of it comes from the named streams, so that a silo's batches do not depend on who trains beside it.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedloom.engines.base import Task
from fedloom.federation.records import Records
from fedloom.methods.base import Phase
from fedloom.privacy.noise import StepDraws, StreamDraws
from fedloom.sharing.plan import Tensors
from fedloom.streams import streams_of

FIRST_STEPS = 16


@dataclass(frozen=True, eq=False)
class Crew:
    """Silos that take their steps of a round together, in descending order of their number of steps."""

    phases: Sequence[Phase]
    batch: int  # rows
    round: int
    steps: Sequence[int]  # of each silo
    numbers: Sequence[int]  # of each in its federation
    offsets: Sequence[int]  # where its records begin in the table that holds those of all
    sizes: Sequence[int]  # how many records it has, or units whose coins fall
    seeds: Sequence[int]  # of its run
    device: torch.device
    first: int = 0  # the step to begin with


def crew_of_one(
    phases: Sequence[Phase], batch: int, task: Task, steps: int, size: int, seed: int, first: int = 0
) -> Crew:
    """A silo alone, whose records are a table of their own: all of its batches are drawn on the host."""
    host = torch.device("cpu")
    return Crew(phases, batch, task.context.round, [steps], [task.silo], [0], [size], [seed], host, first)


@dataclass(frozen=True, eq=False)
class Window:
    """Some consecutive steps of the silos that take them."""

    inputs: tuple[
        Any, ...
    ]  # what a program's steps take, of all steps: tensors (steps, silos, ...) in tuples and dicts
    length: int
    silos: int
    usual: bool = True  # whether it has the shapes that most windows have

    def __len__(self) -> int:
        return self.length

    def step(self, number: int) -> tuple[Any, ...]:
        """What a program takes for one step."""
        inputs: tuple[Any, ...] = tree_map(lambda tensor: tensor[number], self.inputs)
        return inputs


class Stretches(ABC):
    """Which silos of a crew are at work in which steps, and what they draw in them."""

    def __init__(self, crew: Crew) -> None:
        steps = list(crew.steps)
        assert steps == sorted(steps, reverse=True), "those that finish first come last"
        self.steps, self._crew = steps, crew
        self._longest = max(crew.sizes)
        facts = torch.tensor([crew.numbers, crew.offsets, crew.sizes], device=crew.device)
        self._number, self._offset, self._size = facts.unbind()

    def counts(self) -> list[int]:
        """How many silos are at work, for each stretch of steps with a number of its own."""
        return sorted({self._active(step) for step in self.steps if step} | {len(self.steps)}, reverse=True)

    def stretches(self, longest: int) -> Iterator[tuple[int, int, int]]:
        """First step, end and number of silos at work, of at most ``longest`` steps each."""
        for first, last in itertools.pairwise(sorted({self._crew.first, *self.steps})):
            for start in range(first, last, longest):
                yield start, min(start + longest, last), self._active(last)

    @abstractmethod
    def windows(self, longest: int) -> Iterator[Window]:
        """The steps in order, in windows of at most ``longest`` in which the same silos are at work."""

    def _active(self, step: int) -> int:
        return sum(steps >= step for steps in self.steps)

    def _public(self, silos: int) -> StepDraws:
        """The streams of the first ``silos`` silos' runs."""
        return StreamDraws(streams_of(self._crew.seeds[:silos]))

    def _noise(self, source: StepDraws, phase: Phase, steps: Tensor, silos: int, rows: int) -> Tensors:
        """By name, each (steps, silos, rows, *shape)."""
        return objective_noise(source, phase, rows, self._number[:silos], self._crew.round, steps.unsqueeze(1))


class EpochBatches(Stretches):
    """Each silo goes through its records epoch by epoch, each time in another order."""

    def __init__(self, crew: Crew) -> None:
        super().__init__(crew)
        batches = [math.ceil(size / crew.batch) for size in crew.sizes]
        self._epoch = crew.first // max(batches)
        last = max(math.ceil(steps / each) for steps, each in zip(self.steps, batches, strict=True))
        # Of each silo and epoch an order of as many places as the largest silo has. Those beyond a silo's own records
        # come last, and what comes before them is the order that is drawn for this silo alone.
        self._orders = streams_of(crew.seeds).permutation(
            "batches",
            self._longest,
            silo=self._number.unsqueeze(1),
            round=crew.round,
            step=torch.arange(self._epoch, last, device=crew.device),
            shorter=(self._longest - self._size).unsqueeze(1),
            device=crew.device,
        )  # (silos, epochs, longest)

    def windows(self, longest: int) -> Iterator[Window]:
        """The steps in order, in windows of at most ``longest`` in which the same silos are at work."""
        for first, last, silos in self.stretches(longest):
            # The very first is short, so that a GPU has work to do while the rest is drawn.
            middle = FIRST_STEPS if first < FIRST_STEPS < last else first
            if middle > first:
                yield self._window(first, middle, silos)
            yield self._window(middle, last, silos)

    def _window(self, first: int, last: int, silos: int) -> Window:
        batch = self._crew.batch
        step = torch.arange(first, last, device=self._crew.device).unsqueeze(1)  # (steps, 1)
        size = self._size[:silos]
        per_epoch = (size + batch - 1) // batch
        # Each silo goes through its records at its own pace: step s is batch s % per_epoch of epoch s // per_epoch.
        position = (step % per_epoch).unsqueeze(2) * batch + torch.arange(batch, device=self._crew.device)
        mask = position < size.unsqueeze(1)
        # The last batch of an epoch may be short. Its padding repeats the silo's last record: shapes stay fixed, every
        # row can be read, and the mask keeps it from counting.
        inside = torch.minimum(position, size.unsqueeze(1) - 1)
        place = (step // per_epoch - self._epoch).unsqueeze(2) * self._longest + inside  # (steps, silos, batch)
        order = self._orders[:silos].flatten(1)
        rows = torch.gather(order.expand(len(step), -1, -1), 2, place) + self._offset[:silos].unsqueeze(1)
        source = self._public(silos)
        noise = tuple(self._noise(source, phase, step.squeeze(1), silos, batch) for phase in self._crew.phases)
        return Window((rows, mask.to(torch.float32), noise), last - first, silos)


def objective_noise(
    source: StepDraws, phase: Phase, rows: int, silo: int | Tensor, round: int, steps: Tensor
) -> Tensors:
    """The noise that ``rows`` examples need in each of the steps, (*steps, rows, ...)."""
    found = {
        name: source.examples(f"noise/{phase.name}/{name}", rows, math.prod(shape), silo, round, steps)
        for name, shape in phase.objective.noise.items()
    }
    return {name: drawn.reshape(*drawn.shape[:-1], *phase.objective.noise[name]) for name, drawn in found.items()}


def buffers(phases: Sequence[Phase], batch: int, steps: int, silos: int, device: torch.device) -> tuple[Any, ...]:
    """Room for what so many steps take."""

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(steps, silos, batch, *shape, dtype=dtype, device=device)

    noise = tuple({name: buffer(*shape) for name, shape in phase.objective.noise.items()} for phase in phases)
    return buffer(dtype=torch.int64), buffer().fill_(1.0), noise  # no division by zero rows


def numbers_per_step(phases: Sequence[Phase], batch: int) -> int:
    """How many numbers a window holds for each step of a silo."""
    return batch * (sum(map(noise_numbers, phases)) + 3)  # index (two words) and mask


def noise_numbers(phase: Phase) -> int:
    """How many numbers of noise an example of a phase takes."""
    return sum(math.prod(shape) for shape in phase.objective.noise.values())


def gathered(records: Records, decode: Callable[[Tensor], Tensor], index: Tensor, mask: Tensor) -> Tensors:
    """The columns of a batch for each silo, by name, as models see them: ``decode`` is that of their modality."""
    # One copy of all silos' rows from the one table; values become floats only here, so that the table stays as small
    # as the records are stored.
    rows = {
        name: column.index_select(0, index.flatten()).reshape(*index.shape, *column.shape[1:])
        for name, column in records.columns().items()
    }
    return {**rows, "x": decode(rows["x"]), "mask": mask}
