"""DP-SGD for all silos of a stack at once: the gradients of single examples as factors, clipped and summed silo by silo
in one batched program; what leaves it equals what leaves the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from fedloom.engines.base import FederationState, SiloState
from fedloom.engines.fused_batches import Stretches, gathered
from fedloom.engines.fused_noise import DeviceNoise, HostNoise
from fedloom.engines.fused_poisson import (
    NOISE,
    PrivateSchedule,
    private_buffers,
    private_numbers_per_step,
    rows_of_members,
)
from fedloom.engines.fused_program import StackProgram
from fedloom.engines.fused_stack import Member, Stack
from fedloom.engines.fused_step import (
    Precision,
    batched_losses,
    matrix_precision,
    tapped_losses,
    torch_compiled,
    written_out,
)
from fedloom.engines.fused_support import PhaseTrial
from fedloom.engines.optimizers import gradients_of_mean
from fedloom.engines.private_training import public_batch, watched_trial
from fedloom.engines.training import BOUND, parameters_of
from fedloom.federation.records import UNLABELLED
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Phase
from fedloom.privacy.dp_sgd import DPSGD, ClippedSum, Scale, divided, total_of
from fedloom.privacy.gradient_forms import Form, Whole
from fedloom.privacy.noise import StreamNoise
from fedloom.privacy.per_example import Watch
from fedloom.sharing.plan import Tensors


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
        context: Callable[[], RoundContext],
        precision: Precision,
        compiled: bool,
        size: int,
        rows: int,
    ) -> None:
        self._stack, self._mechanism, self._probe, self._trained = stack, mechanism, probe, trained
        self._private = [name for name in trained if mechanism.is_private(name)]
        self._open = [name for name in trained if name not in self._private]
        device = stack.device
        self._taps = [torch.zeros(size, rows, *call.output.shape[1:], device=device) for call in probe.watch.calls]
        tapped = tapped_losses(stack.model, phase, context, precision, trained)
        self._tapped_losses = torch_compiled(tapped) if compiled else tapped
        self._losses = batched_losses(stack.model, phase, context, precision)
        self._written_out = written_out(stack.model, phase, context, precision)
        clip = vmap(self._clip)
        self._clipped = torch_compiled(clip) if compiled else clip

    def __call__(
        self, weights: Tensors, batch: Tensors, received: Tensors, bound: Tensor, example: Tensor
    ) -> tuple[ClippedSum, Tensor]:
        """The clipped sums of one pass, an ``example`` counting so much, and the sum of each term (terms, silos)."""
        records, mask = self._stack.table.records, batch["mask"]
        columns = gathered(records, records.modality.decode, batch["index"], mask)
        own = {name.removeprefix(NOISE): tensor for name, tensor in batch.items() if name.startswith(NOISE)}
        subject = {"subject": columns["subject"]} if "subject" in columns else {}
        if self._probe.quick:
            # Taps are zeros that are added to what layers put out. Rows do not meet in a layer, so one backward pass
            # gives each example's gradient at its own outputs; with the inputs these are its gradients, as factors.
            leaves = {name: weights[name].detach().requires_grad_() for name in self._open}
            silos, rows = mask.shape
            taps = [tap[:silos, :rows].detach().requires_grad_() for tap in self._taps]
            losses, terms, inputs = self._tapped_losses({**weights, **leaves}, columns, own, received, taps)
            plain = self._plain(losses, mask, leaves, example)
            gradients = torch.autograd.grad(losses.sum(), taps, allow_unused=True, materialize_grads=True)
            parts: Any = (inputs, list(gradients), {name: weights[name].detach() for name in self._probe.watch.needed})
        else:
            leaves = {name: weights[name].detach().requires_grad_() for name in self._open}
            losses, terms = self._losses({**weights, **leaves}, columns, own, received)
            plain = self._plain(losses, mask, leaves, example)
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

    @staticmethod
    def _plain(losses: Tensor, mask: Tensor, leaves: Tensors, example: Tensor) -> Tensors:
        if not leaves:
            return {}
        shares = mask * example.unsqueeze(1)
        found = torch.autograd.grad(
            (losses * shares).sum(), list(leaves.values()), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return dict(zip(leaves, found, strict=True))


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
        self._round = 0
        context = lambda: cast("RoundContext", self._context)  # noqa: E731
        self._rows = rows_of_members(stack.members)
        rows = max(self._rows.values())
        self._clipped = {
            number: ClippedPhase(
                stack,
                phase,
                mechanism,
                probes[number],
                self._trained[number],
                context,
                precision,
                compiled,
                size,
                rows,
            )
            for number, phase in enumerate(phases)
            if phase.touches_records
        }
        self._open_losses = {
            number: batched_losses(stack.model, phase, context, precision)
            for number, phase in enumerate(phases)
            if not phase.touches_records
        }
        self._release = torch_compiled(mechanism.release) if compiled else mechanism.release
        self._drawn: dict[int, Tensor] = {}
        self._flat: dict[int, Tensor] = {}
        self._noise: dict[int, Tensors] = {}
        for number in self._clipped:
            shapes = {n: self.weights[n].shape[1:] for n in self._trained[number] if mechanism.is_private(n)}
            numbers = 1 + sum(shape.numel() for shape in shapes.values())
            # Padded, so that every silo's noise begins where memory is read fast.
            self._drawn[number] = torch.zeros(size, -(-numbers // 4) * 4, device=self._device)
            self._flat[number] = self._drawn[number][:, :numbers]
            self._noise[number] = divided(self._flat[number], shapes)
        self._bounds = {number: torch.zeros(size, device=self._device) for number in self._clipped}
        self._scales = torch.ones(3, size, device=self._device)  # for each silo a Scale
        self._public_group = torch.zeros(size, stack.kind.local.batch_size, dtype=torch.int64, device=self._device)
        self._source: HostNoise | DeviceNoise = HostNoise((), (), 0, ())

    def begin(self, context: RoundContext, secrets: Sequence[StreamNoise]) -> None:
        """A new round, and what hides the records of each member of a chunk."""
        super().begin(context, secrets)
        self._round = context.round

    def load(self, members: Sequence[Member], states: Sequence[FederationState]) -> None:
        """Also each silo's clip bounds, scales and public rows, all by the plan of its own run."""
        super().load(members, states)
        rows, silos = self._public_group.shape[1], len(members)
        mechanisms = [member.privacy.mechanism(self._round) for member in members]
        self._scales[:, :silos] = torch.tensor([astuple(mechanism.scale) for mechanism in mechanisms]).t()
        batches = [public_batch(member.silo, rows) for member in members]
        self._public_group[:silos] = torch.stack([batch.group for batch in batches])
        kept = [s.silos.get(member.index, SiloState()).tensors for member, s in zip(members, states, strict=True)]
        for number, bounds in self._bounds.items():
            name = BOUND + self._phases[number].name
            found = zip(kept, mechanisms, strict=True)
            bounds[:silos] = torch.stack([own.get(name, mechanism.clipping.start()) for own, mechanism in found])
        if self._host_noise:
            self._source = HostNoise(members, self._secrets, self._round, list(self._flat.values()))
        else:
            self._source = DeviceNoise(members, self._secrets, self._round, list(self._drawn.values()), self._device)

    def schedule(self, members: Sequence[Member], round: int) -> Stretches:
        """Poisson batches for the members of a chunk: who is drawn in each step, and where each record lies."""
        return PrivateSchedule(self._stack, self._rows, members, self._secrets, round)

    @property
    def numbers_per_step(self) -> int:
        """How many numbers a window of Poisson batches holds for each step, with what it takes to draw them."""
        units = max(member.privacy.units for member in self._stack.members)
        return private_numbers_per_step(self._stack.kind, units, max(self._rows.values()))

    def buffers(self, steps: int) -> tuple[Any, ...]:
        """For each phase its only pass."""
        return private_buffers(self._stack.kind, steps, self.size, max(self._rows.values()), self._device)

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
            self._optimizers[number].step(silos, gradients)
            self._sums[number][:, :silos].add_(means)

    def _private_step(
        self, number: int, weights: Tensors, passes: tuple[Tensors, ...], received: Tensors, silos: int
    ) -> tuple[list[Tensor], Tensor]:
        bound = self._bounds[number][:silos]
        scales = self._scales[:, :silos]
        found = [self._clipped[number](weights, each, received, bound, scales[0]) for each in passes]
        total = total_of([sums for sums, _ in found])
        secret = {name: tensor[:silos] for name, tensor in self._noise[number].items()}
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
        own = {name.removeprefix(NOISE): tensor for name, tensor in only.items()}
        group = self._public_group[:silos]
        mask, shape = torch.ones(group.shape, device=self._device), self._stack.table.records.shape
        # A single zero that looks like records of the right shape: there is nothing to gather, and nothing to hold.
        x = torch.zeros((), device=self._device).expand(*group.shape, *shape)
        columns = {"x": x, "y": torch.full_like(group, UNLABELLED), "group": group, "mask": mask}
        leaves = {name: weights[name].detach().requires_grad_() for name in self._trained[number]}
        losses, terms = self._open_losses[number]({**weights, **leaves}, columns, own, received)
        means = torch.stack([losses.detach(), *(term.detach() for term in terms.values())]).mean(dim=-1)
        return gradients_of_mean(losses, mask, list(leaves.values())), means

    def kept(self, silos: int) -> list[SiloState]:
        """Also a bound that is searched for."""
        states = super().kept(silos)
        if not self._mechanism.clipping.share:
            return states
        found = {BOUND + self._phases[number].name: bounds.cpu() for number, bounds in self._bounds.items()}
        return [
            SiloState(state.tensors | {name: bounds[position].clone() for name, bounds in found.items()})
            for position, state in enumerate(states)
        ]
