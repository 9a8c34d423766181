"""DP-SGD for all silos of a stack at once: the gradients of single examples as factors, clipped and summed silo by silo
in one batched program; what leaves it equals what leaves the plain loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from fedloom.engines.base import FederationState, SiloState
from fedloom.engines.batches import Stretches, gathered
from fedloom.engines.fused_noise import DeviceNoise, HostNoise, NoiseRoom
from fedloom.engines.fused_program import StackProgram
from fedloom.engines.fused_stack import Member, Stack
from fedloom.engines.fused_step import (
    Batching,
    Precision,
    batched_losses,
    matrix_precision,
    tapped_losses,
    written_out,
)
from fedloom.engines.fused_support import PhaseTrial
from fedloom.engines.optimizers import gradients_of_mean
from fedloom.engines.poisson_batches import (
    NOISE,
    PoissonBatches,
    poisson_buffers,
    poisson_numbers_per_step,
    sampling_of,
)
from fedloom.engines.private_training import parameters_of, public_batch, watched_trial
from fedloom.federation.records import UNLABELLED
from fedloom.methods.base import Phase
from fedloom.privacy.dp_sgd import DPSGD, ClippedSum, Scale, plain_sum, total_of
from fedloom.privacy.gradient_forms import Form, Whole
from fedloom.privacy.noise import StreamDraws
from fedloom.privacy.per_example import Watch
from fedloom.sharing.codec import under
from fedloom.sharing.plan import Tensors
from fedloom.streams import streams_of


@dataclass(frozen=True, eq=False)
class Probe:
    """What a trial of one phase showed of the gradients of its examples."""

    watch: Watch  # over the layers as the method built them; it has seen every call that the phase makes
    quick: bool  # whether that is all there is to see, so that gradients need not be written out


def probed(stack: Stack, phase: Phase) -> Probe:
    """A trial on some records of the stack."""
    trained, first = parameters_of(phase, stack.model), stack.members[0]
    made_up = first.trainer.made_up(first.index).to(stack.device)
    return Probe(*watched_trial(stack.model, phase, trained, made_up, first.trainer.streams))


def private_trial(trial: PhaseTrial, mechanism: DPSGD) -> PhaseTrial:
    """Clipped sums of linear layers do not come out transposed, as plain gradients do."""
    gradients = {n: g.contiguous() if mechanism.is_private(n) else g for n, g in trial.gradients.items()}
    return replace(trial, gradients=gradients)


class ClippedPhase:
    """From the batches of a phase to the sums of its clipped gradients, for all silos at once."""

    def __init__(
        self,
        stack: Stack,
        phase: Phase,
        mechanism: DPSGD,
        probe: Probe,
        trained: Sequence[str],
        batching: Batching,
        places: tuple[int, int],
    ) -> None:
        """``places``: how many silos, and how many rows of a pass."""
        self._stack, self._mechanism, self._probe = stack, mechanism, probe
        self._private = [name for name in trained if mechanism.is_private(name)]
        self._open = [name for name in trained if name not in self._private]
        self._taps = [torch.zeros(*places, *c.output.shape[1:], device=stack.device) for c in probe.watch.calls]
        self._tapped_losses = batching.quickened(tapped_losses(batching, phase, trained))
        self._losses = batched_losses(batching, phase)
        self._written_out = written_out(batching, phase)
        self._clipped = batching.quickened(vmap(self._clip))

    def __call__(
        self, weights: Tensors, batch: Tensors, received: Tensors, bound: Tensor, example: Tensor
    ) -> tuple[ClippedSum, Tensor]:
        """The clipped sums of one pass, an ``example`` counting so much, and the sum of each term (terms, silos)."""
        records, mask = self._stack.table.records, batch["mask"]
        columns = gathered(records, records.modality.decode, batch["index"], mask)
        own = under(NOISE, batch)
        subject = {"subject": columns["subject"]} if "subject" in columns else {}
        if self._probe.quick:
            # Taps are zeros that are added to what layers put out. Rows do not meet in a layer, so one backward pass
            # gives each example's gradient at its own outputs; with the inputs these are its gradients, as factors.
            leaves = {name: weights[name].detach().requires_grad_() for name in self._open}
            silos, rows = mask.shape
            taps = [tap[:silos, :rows].detach().requires_grad_() for tap in self._taps]
            losses, terms, inputs = self._tapped_losses({**weights, **leaves}, columns, own, received, taps)
            plain = plain_sum(losses, mask * example.unsqueeze(1), leaves)
            gradients = torch.autograd.grad(losses.sum(), taps, allow_unused=True, materialize_grads=True)
            parts: Any = (inputs, list(gradients), {name: weights[name].detach() for name in self._probe.watch.needed})
        else:
            leaves = {name: weights[name].detach().requires_grad_() for name in self._open}
            losses, terms = self._losses({**weights, **leaves}, columns, own, received)
            plain = plain_sum(losses, mask * example.unsqueeze(1), leaves)
            lent = {name: tensor.detach() for name, tensor in weights.items()}
            parts = self._written_out({n: lent.pop(n) for n in self._private}, lent, columns, own, received)
        with matrix_precision("float32"):
            sums, below, bounds = self._clipped(parts, mask, bound, example, subject)
        unreached = {n: torch.zeros_like(weights[n]) for n in self._private if n not in sums}
        values = torch.stack([losses.detach(), *(term.detach() for term in terms.values())])
        return ClippedSum({**sums, **unreached, **plain}, below, bounds), (values * mask).sum(dim=-1)

    def _clip(
        self, parts: Any, mask: Tensor, bound: Tensor, example: Tensor, subject: Tensors
    ) -> tuple[Tensors, Tensor, Tensor]:
        """One silo's; ``parts`` are those of a watch's forms, or the examples' gradients by parameter."""
        forms: dict[str, Form]
        if self._probe.quick:
            reached = self._probe.watch.forms(*parts)
            forms = {name: reached[name] for name in self._private if name in reached}
        else:
            forms = {name: Whole(rows) for name, rows in parts.items()}
        scale = replace(self._mechanism.scale, example=example)
        total = self._mechanism.clip(forms, mask, bound, subject.get("subject"), scale)
        return dict(total.gradients), total.below, total.bound


class PrivateProgram(StackProgram):
    """A stack under DP-SGD: beside weights and moments also clip bounds, scales and noise."""

    def __init__(
        self,
        stack: Stack,
        size: int,
        trials: Sequence[PhaseTrial],
        precision: Precision,
        compiled: bool,
        probes: Sequence[Probe],
        host_noise: bool,
    ) -> None:
        mechanism, phases = stack.kind.privacy, stack.kind.phases
        assert mechanism is not None, "a stack under DP-SGD"
        self._mechanism = mechanism
        adapted = [private_trial(t, mechanism) if p.touches_records else t for p, t in zip(phases, trials, strict=True)]
        super().__init__(stack, size, adapted, precision, compiled)
        self._host_noise = host_noise or self._device.type == "cpu"
        self._samplings = {m: sampling_of(m.silo, mechanism.unit, m.privacy.rate) for m in stack.members}
        self._rows = max(sampling.rows for sampling in self._samplings.values())  # of a pass, the same in all chunks
        batching, places = Batching(stack.model, self._now, precision, compiled), (size, self._rows)
        self._clipped = {
            number: ClippedPhase(stack, phase, mechanism, probes[number], self._trained[number], batching, places)
            for number, phase in enumerate(phases)
            if phase.touches_records
        }
        self._open_losses = {
            number: batched_losses(batching, phase) for number, phase in enumerate(phases) if not phase.touches_records
        }
        self._release = batching.quickened(mechanism.release)
        self._rooms = {number: self._room(self._trained[number]) for number in self._clipped}
        self._scales = torch.ones(3, size, device=self._device)  # for each silo a Scale
        self._public_group = torch.zeros(size, self._batch, dtype=torch.int64, device=self._device)
        self._source: HostNoise | DeviceNoise = HostNoise((), (), 0, ())

    def _room(self, trained: Sequence[str]) -> NoiseRoom:
        shapes = {n: self.weights[n].shape[1:] for n in trained if self._mechanism.is_private(n)}
        return NoiseRoom.of(self.size, shapes, self._device)

    def load(self, members: Sequence[Member], states: Sequence[FederationState]) -> None:
        """Also each silo's clip bounds, scales and public rows, all by the plan of its own run."""
        super().load(members, states)
        silos = len(members)
        mechanisms = [member.privacy.mechanism(self._round) for member in members]
        self._scales[:, :silos] = torch.tensor([astuple(mechanism.scale) for mechanism in mechanisms]).t()
        batches = [public_batch(member.silo, self._batch) for member in members]
        self._public_group[:silos] = torch.stack([batch.group for batch in batches])
        kept = [s.silos.get(member.index, SiloState()).tensors for member, s in zip(members, states, strict=True)]
        self._state.load_bounds(kept, mechanisms)
        rooms = list(self._rooms.values())
        if self._host_noise:
            self._source = HostNoise(members, self._secrets, self._round, [room.flat for room in rooms])
        else:
            drawn = [room.drawn for room in rooms]
            self._source = DeviceNoise(members, self._secrets, self._round, drawn, self._device)

    def schedule(self, members: Sequence[Member]) -> Stretches:
        """Poisson batches for the members of a chunk: who is drawn in each step, and where each record lies."""
        samplings = [self._samplings[member] for member in members]
        keys = [secret.streams.seed for secret in self._secrets]
        crew = self._crew(members, [sampling.units for sampling in samplings])
        return PoissonBatches(crew, samplings, lambda silos: StreamDraws(streams_of(keys[:silos])), self._rows)

    @property
    def numbers_per_step(self) -> int:
        """How many numbers a window of Poisson batches holds for each step, with what it takes to draw them."""
        units = max(sampling.units for sampling in self._samplings.values())
        return poisson_numbers_per_step(self._phases, self._batch, units, self._rows)

    def buffers(self, steps: int) -> tuple[Any, ...]:
        """For each phase its only pass."""
        return poisson_buffers(self._phases, self._batch, steps, self.size, self._rows, self._device)

    def draw(self, silos: int) -> None:
        """The noise of a step."""
        self._source.draw(silos)

    def step(self, inputs: tuple[Any, ...]) -> None:
        """One step of every phase, given for each its passes."""
        silos = len(tree_leaves(inputs)[0])
        received = {name: tensor[:silos] for name, tensor in self._received.items()}
        for number, passes in enumerate(inputs):
            weights = self._lent(silos)
            step = self._private_step if number in self._clipped else self._open_step
            gradients, means = step(number, weights, passes, received, silos)
            self._state.optimizers[number].step(silos, gradients)
            self._sums[number][:, :silos].add_(means)

    def _private_step(
        self, number: int, weights: Tensors, passes: tuple[Tensors, ...], received: Tensors, silos: int
    ) -> tuple[list[Tensor], Tensor]:
        bound = self._state.bounds[self._phases[number].name][:silos]
        scales = self._scales[:, :silos]
        found = [self._clipped[number](weights, each, received, bound, scales[0]) for each in passes]
        total = total_of([sums for sums, _ in found])
        secret = {name: tensor[:silos] for name, tensor in self._rooms[number].named.items()}
        gradients, following = self._release(total, secret, Scale(*scales.unbind()))
        bound.copy_(following)
        rows = reduce(torch.add, (each["mask"].sum(dim=1) for each in passes))
        means = reduce(torch.add, (terms for _, terms in found)) / rows.clamp_min(1.0)
        return [gradients[name] for name in self._trained[number]], means

    def _open_step(
        self, number: int, weights: Tensors, passes: tuple[Tensors, ...], received: Tensors, silos: int
    ) -> tuple[Sequence[Tensor], Tensor]:
        """A phase that touches no records: as many rows in every step, and none of them is one."""
        (only,) = passes
        own = under(NOISE, only)
        group = self._public_group[:silos]
        mask, shape = torch.ones(group.shape, device=self._device), self._stack.table.records.shape
        # A single zero that looks like records of the right shape: there is nothing to gather, and nothing to hold.
        x = torch.zeros((), device=self._device).expand(*group.shape, *shape)
        columns = {"x": x, "y": torch.full_like(group, UNLABELLED), "group": group, "mask": mask}
        leaves = {name: weights[name].detach().requires_grad_() for name in self._trained[number]}
        losses, terms = self._open_losses[number]({**weights, **leaves}, columns, own, received)
        means = torch.stack([losses.detach(), *(term.detach() for term in terms.values())]).mean(dim=-1)
        return gradients_of_mean(losses, mask, list(leaves.values())), means
