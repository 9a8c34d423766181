"""Poisson batches: whom the coins of each step choose, in passes, and the noise that comes with every record."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.engines.batches import Crew, Stretches, Window, noise_numbers
from fedloom.federation.records import Silo
from fedloom.methods.base import Phase
from fedloom.outline import in_outline
from fedloom.privacy.noise import StepDraws
from fedloom.privacy.sampling import capacity, in_eights, subject_passes
from fedloom.privacy.silo_privacy import unit_numbers
from fedloom.sharing.codec import placed
from fedloom.sharing.plan import Tensors

NOISE = "noise/"
# For each phase its passes, each with ``index``, ``mask`` and ``noise/<name>``; a phase without records has noise only.
PhaseInputs = tuple[tuple[Tensors, ...], ...]


@dataclass(frozen=True, eq=False)
class Sampling:
    """How a silo's units come into batches."""

    __repr__ = in_outline

    units: int
    rate: float  # of each unit's coin
    rows: int  # of a pass
    subject: Tensor | None  # of each record, where units are subjects


def sampling_of(silo: Silo, unit: str, rate: float) -> Sampling:
    """The sampling of a silo's records, or subjects."""
    subject = unit_numbers(silo, unit)
    sizes = torch.ones(len(silo), dtype=torch.int64) if subject is None else torch.bincount(subject)
    return Sampling(len(sizes), rate, capacity(sizes, rate), subject)


class PoissonWindow(Window):
    """A window whose steps all have the same number of passes; ``inputs`` are of each phase."""

    def step(self, number: int) -> tuple[Any, ...]:
        """The inputs of one step; on a CPU, where shapes need not be fixed, without needless rows."""
        return tuple(tuple(_without_needless(each) for each in passes) for passes in super().step(number))


def _without_needless(tensors: Tensors) -> Tensors:
    if "mask" not in tensors or tensors["mask"].device.type != "cpu":
        return tensors
    rows = in_eights(float(tensors["mask"].sum(dim=1).max()))
    return {name: tensor[:, :rows] for name, tensor in tensors.items()}


@dataclass(frozen=True, eq=False)
class _Drawn:
    """The batches of one phase in some steps; shapes are (steps, silos, passes, rows)."""

    __repr__ = in_outline

    index: Tensor  # records of the silo
    mask: Tensor
    rank: Tensor  # how many were drawn before: the row of a record's noise
    passes: list[int]  # that each step needs


class PoissonBatches(Stretches):
    """Every phase that touches records draws batches of its own: two sums over one sample would cost more than they
    are accounted for. The others see as many rows in every step, whoever was drawn.
    """

    def __init__(
        self, crew: Crew, samplings: Sequence[Sampling], hidden: Callable[[int], StepDraws], width: int
    ) -> None:
        """``hidden`` is what the records of the first so many silos are drawn by; passes have ``width`` places."""
        super().__init__(crew)
        self._private = [phase for phase in crew.phases if phase.touches_records]
        self._rate = torch.tensor([each.rate for each in samplings], dtype=torch.float64, device=crew.device)
        self._rows, self._subjects = [each.rows for each in samplings], [each.subject for each in samplings]
        self._hidden, self._width = hidden, width

    def windows(self, longest: int) -> Iterator[Window]:
        """The steps in order, in windows of at most ``longest`` in which the same silos make equally many passes."""
        for first, last, silos in self.stretches(longest):
            steps = torch.arange(first, last, device=self._crew.device)
            # Batches are numbered step by step, phase by phase.
            drawn = [self._drawn(steps * len(self._private) + j, silos) for j in range(len(self._private))]
            needed = list(zip(*(each.passes for each in drawn), strict=True)) or [()] * len(steps)
            # How many passes a step needs is known when its coins have fallen. All steps of a window have equal shapes,
            # so a step that needs another number of passes than the one before begins a window.
            start = 0
            for passes, run in itertools.groupby(needed):
                stop = start + len(list(run))
                yield self._window(steps, slice(start, stop), silos, drawn, passes)
                start = stop

    def _window(self, steps: Tensor, part: slice, silos: int, drawn: list[_Drawn], passes: tuple[int, ...]) -> Window:
        rest = iter(zip(drawn, passes, strict=True))
        inputs: list[tuple[Tensors, ...]] = []
        for phase in self._crew.phases:
            if phase.touches_records:
                own, count = next(rest)
                inputs.append(self._batches(phase, steps[part], part, silos, own, count))
            else:
                inputs.append((self._named_noise(phase, steps[part], silos, self._crew.batch),))
        usual = all(count == 1 for count in passes)  # or else one pass is not enough
        return PoissonWindow(tuple(inputs), part.stop - part.start, silos, usual)

    def _batches(
        self, phase: Phase, steps: Tensor, part: slice, silos: int, drawn: _Drawn, passes: int
    ) -> tuple[Tensors, ...]:
        index, mask, rank = (tensor[part, :, :passes] for tensor in (drawn.index, drawn.mask, drawn.rank))
        tensors = {"index": index + self._offset[:silos].reshape(-1, 1, 1), "mask": mask}
        if passes == 1:  # a record's row is its rank
            noise = {n: t.unsqueeze(2) for n, t in self._named_noise(phase, steps, silos, self._width).items()}
        else:  # passes end where units or rows do, so a record's row there is not its rank
            noise = {
                name: _picked(tensor, rank)
                for name, tensor in self._named_noise(phase, steps, silos, int(rank.max()) + 1).items()
            }
        return tuple({n: t[:, :, i] for n, t in (tensors | noise).items()} for i in range(passes))

    def _named_noise(self, phase: Phase, steps: Tensor, silos: int, rows: int) -> Tensors:
        """What a pass has of it.

        Its rows go to the examples as they were drawn, so one record more shifts those of the others: whoever knew them
        would see the sum move by more than one clipped gradient. So it comes from where the coins come from.
        """
        source = self._hidden(silos) if phase.touches_records else self._public(silos)
        return placed(NOISE, self._noise(source, phase, steps, silos, rows))

    def _drawn(self, moments: Tensor, silos: int) -> _Drawn:
        # A coin for each unit of the largest silo; those of units that a silo does not have are thrown away. A unit's
        # coin depends on its own number alone, so it falls alike whoever trains beside.
        coins = self._hidden(silos).coins(self._longest, self._number[:silos], self._crew.round, moments.unsqueeze(1))
        chosen = coins < self._rate[:silos].unsqueeze(1)
        chosen &= torch.arange(self._longest, device=coins.device) < self._size[:silos].unsqueeze(1)
        places = self._places_of_records(chosen) if self._subjects[0] is None else self._places_of_subjects(chosen)
        step, silo, number, row, rank, record = places
        counts = torch.ones(len(moments), dtype=torch.int64, device=self._crew.device)
        # A step that nobody was drawn for makes one pass all the same, of noise alone: to leave it out would tell.
        passes = counts.scatter_reduce(0, step, number + 1, "amax").tolist()
        shape = (len(moments), silos, max(passes), self._width)
        # Rows that stay free read record 0, and their mask keeps them from counting.
        index, ranks = (torch.zeros(shape, dtype=torch.int64, device=self._crew.device) for _ in range(2))
        mask = torch.zeros(shape, device=self._crew.device)
        index[step, silo, number, row] = record
        ranks[step, silo, number, row] = rank
        mask[step, silo, number, row] = 1.0
        return _Drawn(index, mask, ranks, passes)

    def _places_of_records(self, chosen: Tensor) -> tuple[Tensor, ...]:
        """Step, silo, pass, row, rank and record of everything drawn."""
        step, silo, record = chosen.nonzero(as_tuple=True)
        # Found without a loop: how many of its silo's records were drawn before it in this step.
        rank = chosen.cumsum(dim=-1)[step, silo, record] - 1
        rows = torch.tensor(self._rows, device=self._crew.device)[silo]
        return step, silo, rank // rows, rank % rows, rank, record

    def _places_of_subjects(self, chosen: Tensor) -> tuple[Tensor, ...]:
        """The places of records where units are subjects, whose records stay together in one pass."""
        places: list[tuple[int, int, int, int, int, int]] = []
        for (step, batch), silo in itertools.product(enumerate(chosen.cpu()), range(chosen.shape[1])):
            subject = self._subjects[silo]
            assert subject is not None, "all silos have the same unit"
            rank = 0
            for number, each in enumerate(subject_passes(batch[silo].nonzero().flatten(), subject, self._rows[silo])):
                for row, record in enumerate(each.index[each.mask > 0].tolist()):
                    places.append((step, silo, number, row, rank, record))
                    rank += 1
        return tuple(torch.tensor(places, dtype=torch.int64, device=self._crew.device).reshape(-1, 6).t())


def _picked(noise: Tensor, rank: Tensor) -> Tensor:
    """Noise (steps, silos, rows, ...) in the order of the passes, (steps, silos, passes, rows, ...)."""
    # gather wants an index for each number that it reads; expanded, it takes no memory.
    flat = noise.flatten(3) if noise.dim() > 3 else noise.unsqueeze(3)
    rows = rank.flatten(2).unsqueeze(3).expand(-1, -1, -1, flat.shape[3])
    return torch.gather(flat, 2, rows).reshape(*rank.shape, *noise.shape[3:])


def poisson_buffers(
    phases: Sequence[Phase], batch: int, steps: int, silos: int, rows: int, device: torch.device
) -> PhaseInputs:
    """Memory for a window of usual length, which recorded programs read their inputs from."""

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(steps, silos, *shape, dtype=dtype, device=device)

    def of_phase(phase: Phase) -> Tensors:
        width = rows if phase.touches_records else batch
        noise = {NOISE + name: buffer(width, *shape) for name, shape in phase.objective.noise.items()}
        index = {"index": buffer(width, dtype=torch.int64), "mask": buffer(width)} if phase.touches_records else {}
        return {**index, **noise}

    return tuple((of_phase(phase),) for phase in phases)


def poisson_numbers_per_step(phases: Sequence[Phase], batch: int, units: int, rows: int) -> int:
    """How many numbers a window holds for each step of a silo of so many units, and the drawing of it beside them."""
    return sum(
        rows * (noise_numbers(phase) + 5) + 8 * units if phase.touches_records else batch * noise_numbers(phase)
        for phase in phases
    )
