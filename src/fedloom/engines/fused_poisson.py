"""Poisson batches of a whole chunk of silos: the coins and the noise that the plain loop draws silo by silo."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.engines.fused_batches import Stretches
from fedloom.engines.fused_stack import Member, Stack, StackKind
from fedloom.engines.private_training import unit_sizes
from fedloom.methods.base import Phase
from fedloom.outline import in_outline
from fedloom.privacy.noise import StreamNoise, coins
from fedloom.privacy.sampling import capacity, in_eights, subject_passes
from fedloom.privacy.silo_privacy import unit_numbers
from fedloom.sharing.plan import Tensors
from fedloom.streams import streams_of

NOISE = "noise/"
# For each phase its passes, each with ``index``, ``mask`` and ``noise/<name>``; a phase without records has noise only.
PhaseInputs = tuple[tuple[Tensors, ...], ...]


@dataclass(frozen=True, eq=False)
class PrivateWindow:
    """Some consecutive steps of the silos that take them, all with the same number of passes."""

    __repr__ = in_outline

    inputs: PhaseInputs  # each tensor (steps, silos, rows, ...)
    length: int
    silos: int

    def __len__(self) -> int:
        return self.length

    @property
    def usual(self) -> bool:
        """Whether one pass is enough in every phase."""
        return all(len(passes) == 1 for passes in self.inputs)

    def step(self, number: int) -> PhaseInputs:
        """The inputs of one step; on a CPU, where shapes need not be fixed, without needless rows."""
        return tuple(tuple(self._pass(each, number) for each in passes) for passes in self.inputs)

    @staticmethod
    def _pass(tensors: Tensors, number: int) -> Tensors:
        own = {name: tensor[number] for name, tensor in tensors.items()}
        if "mask" not in own or own["mask"].device.type != "cpu":
            return own
        rows = in_eights(float(own["mask"].sum(dim=1).max()))
        return {name: tensor[:, :rows] for name, tensor in own.items()}


@dataclass(frozen=True, eq=False)
class _Drawn:
    """The batches of one phase in some steps; shapes are (steps, silos, passes, rows)."""

    __repr__ = in_outline

    index: Tensor  # records of the silo
    mask: Tensor
    rank: Tensor  # how many were drawn before: the row of a record's noise
    passes: list[int]  # that each step needs


class PrivateSchedule(Stretches):
    """What the silos of a chunk do in a round; silos come in descending order of their number of steps."""

    def __init__(
        self,
        stack: Stack,
        rows: Mapping[Member, int],
        members: Sequence[Member],
        secrets: Sequence[StreamNoise],
        round: int,
    ) -> None:
        """``rows`` of a pass of each member of the stack; ``secrets`` hide the records of those of the chunk."""
        super().__init__([member.steps for member in members])
        privacies = [member.privacy for member in members]
        self._phases, self._batch, self._round = stack.kind.phases, stack.kind.local.batch_size, round
        self._seeds = [member.trainer.config.seed for member in members]
        self._keys = [secret.streams.seed for secret in secrets]
        self._private = [phase for phase in self._phases if phase.touches_records]
        self._device = device = stack.device
        self._number = torch.tensor([member.index for member in members], device=device)
        self._offset = torch.tensor(stack.table.load([member.silo for member in members]), device=device)
        self._units = torch.tensor([privacy.units for privacy in privacies], device=device)
        self._longest = max(privacy.units for privacy in privacies)
        self._rate = torch.tensor([privacy.rate for privacy in privacies], dtype=torch.float64, device=device)
        self._rows = [rows[member] for member in members]
        self._width = max(rows.values())  # the same in all chunks
        found = zip(members, privacies, strict=True)
        self._subjects = [unit_numbers(member.silo, privacy.settings.unit) for member, privacy in found]

    def windows(self, longest: int) -> Iterator[PrivateWindow]:
        """The steps in order, in windows of at most ``longest`` in which the same silos make equally many passes."""
        for first, last, silos in self.stretches(longest):
            steps = torch.arange(first, last, device=self._device)
            # Every phase that touches records draws batches of its own: they are numbered step by step, phase by phase.
            drawn = [self._drawn(steps * len(self._private) + j, silos) for j in range(len(self._private))]
            needed = list(zip(*(each.passes for each in drawn), strict=True)) or [()] * len(steps)
            # How many passes a step needs is known when its coins have fallen. All steps of a window have equal shapes,
            # so a step that needs another number of passes than the one before begins a window.
            start = 0
            for passes, run in itertools.groupby(needed):
                stop = start + len(list(run))
                yield self._window(steps, slice(start, stop), silos, drawn, passes)
                start = stop

    def _window(
        self, steps: Tensor, part: slice, silos: int, drawn: list[_Drawn], passes: tuple[int, ...]
    ) -> PrivateWindow:
        rest = iter(zip(drawn, passes, strict=True))
        inputs: list[tuple[Tensors, ...]] = []
        for phase in self._phases:
            if phase.touches_records:
                own, count = next(rest)
                inputs.append(self._batches(phase, steps[part], part, silos, own, count))
            else:
                inputs.append((self._noise(phase, steps[part], silos, self._batch),))
        return PrivateWindow(tuple(inputs), part.stop - part.start, silos)

    def _batches(
        self, phase: Phase, steps: Tensor, part: slice, silos: int, drawn: _Drawn, passes: int
    ) -> tuple[Tensors, ...]:
        index, mask, rank = (tensor[part, :, :passes] for tensor in (drawn.index, drawn.mask, drawn.rank))
        tensors = {"index": index + self._offset[:silos].reshape(-1, 1, 1), "mask": mask}
        if passes == 1:  # a record's row is its rank
            noise = {n: t.unsqueeze(2) for n, t in self._noise(phase, steps, silos, self._width).items()}
        else:  # passes end where units or rows do, so a record's row there is not its rank
            noise = {
                name: _picked(tensor, rank)
                for name, tensor in self._noise(phase, steps, silos, int(rank.max()) + 1).items()
            }
        return tuple({n: t[:, :, i] for n, t in (tensors | noise).items()} for i in range(passes))

    def _noise(self, phase: Phase, steps: Tensor, silos: int, rows: int) -> Tensors:
        """By name, each (steps, silos, rows, *shape)."""
        keys = self._keys if phase.touches_records else self._seeds
        return {
            NOISE + name: streams_of(keys[:silos])
            .normal(
                f"noise/{phase.name}/{name}",
                rows,
                math.prod(shape),
                silo=self._number[:silos],
                round=self._round,
                step=steps.unsqueeze(1),
                device=self._device,
            )
            .reshape(len(steps), silos, rows, *shape)
            for name, shape in phase.objective.noise.items()
        }

    def _drawn(self, moments: Tensor, silos: int) -> _Drawn:
        # A coin for each unit of the largest silo; those of units that a silo does not have are thrown away. A unit's
        # coin depends on its own number alone, so it falls as in the plain loop.
        chosen = coins(
            streams_of(self._keys[:silos]),
            self._longest,
            silo=self._number[:silos],
            round=self._round,
            step=moments.unsqueeze(1),
            device=self._device,
        ) < self._rate[:silos].unsqueeze(1)
        chosen &= torch.arange(self._longest, device=self._device) < self._units[:silos].unsqueeze(1)
        places = self._places_of_records(chosen) if self._subjects[0] is None else self._places_of_subjects(chosen)
        step, silo, number, row, rank, record = places
        counts = torch.ones(len(moments), dtype=torch.int64, device=self._device)
        # A step that nobody was drawn for makes one pass all the same, of noise alone: to leave it out would tell.
        passes = counts.scatter_reduce(0, step, number + 1, "amax").tolist()
        shape = (len(moments), silos, max(passes), self._width)
        # Rows that stay free read record 0, and their mask keeps them from counting.
        index, ranks = (torch.zeros(shape, dtype=torch.int64, device=self._device) for _ in range(2))
        mask = torch.zeros(shape, device=self._device)
        index[step, silo, number, row] = record
        ranks[step, silo, number, row] = rank
        mask[step, silo, number, row] = 1.0
        return _Drawn(index, mask, ranks, passes)

    def _places_of_records(self, chosen: Tensor) -> tuple[Tensor, ...]:
        """Step, silo, pass, row, rank and record of everything drawn."""
        step, silo, record = chosen.nonzero(as_tuple=True)
        # Found without a loop: how many of its silo's records were drawn before it in this step.
        rank = chosen.cumsum(dim=-1)[step, silo, record] - 1
        rows = torch.tensor(self._rows, device=self._device)[silo]
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
        return tuple(torch.tensor(places, dtype=torch.int64, device=self._device).reshape(-1, 6).t())


def _picked(noise: Tensor, rank: Tensor) -> Tensor:
    """Noise (steps, silos, rows, ...) in the order of the passes, (steps, silos, passes, rows, ...)."""
    # gather wants an index for each number that it reads; expanded, it takes no memory.
    flat = noise.flatten(3) if noise.dim() > 3 else noise.unsqueeze(3)
    rows = rank.flatten(2).unsqueeze(3).expand(-1, -1, -1, flat.shape[3])
    return torch.gather(flat, 2, rows).reshape(*rank.shape, *noise.shape[3:])


def rows_of_members(members: Sequence[Member]) -> dict[Member, int]:
    """How many rows one pass of each member has."""
    found = {}
    for member in members:
        silo, privacy = member.silo, member.privacy
        found[member] = capacity(unit_sizes(silo, unit_numbers(silo, privacy.settings.unit)), privacy.rate)
    return found


def private_buffers(kind: StackKind, steps: int, silos: int, rows: int, device: torch.device) -> PhaseInputs:
    """Memory for a window of usual length, which recorded programs read their inputs from."""

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(steps, silos, *shape, dtype=dtype, device=device)

    def of_phase(phase: Phase) -> Tensors:
        width = rows if phase.touches_records else kind.local.batch_size
        noise = {NOISE + name: buffer(width, *shape) for name, shape in phase.objective.noise.items()}
        batch = {"index": buffer(width, dtype=torch.int64), "mask": buffer(width)}
        return {**batch, **noise} if phase.touches_records else noise

    return tuple((of_phase(phase),) for phase in kind.phases)


def private_numbers_per_step(kind: StackKind, units: int, rows: int) -> int:
    """How many numbers a window holds for each step of a silo of so many units, and the drawing of it beside them."""
    total = 0
    for phase in kind.phases:
        noise = sum(math.prod(shape) for shape in phase.objective.noise.values())
        total += rows * (noise + 5) + 8 * units if phase.touches_records else kind.local.batch_size * noise
    return total
