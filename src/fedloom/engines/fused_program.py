"""The memory of one stack on one device, and the step that runs in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.func import vmap

from fedloom.engines.base import FederationState, SiloState, received_by
from fedloom.engines.batches import Crew, EpochBatches, Stretches, buffers, numbers_per_step
from fedloom.engines.fused_lanes import LanedGradients, Lanes
from fedloom.engines.fused_stack import Member, Stack
from fedloom.engines.fused_step import Batching, Gradients, Precision, WatchedContext, gradients_of_stack, laid_out
from fedloom.engines.fused_support import PhaseTrial
from fedloom.engines.local_state import LocalState
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import unchanged
from fedloom.privacy.noise import StreamNoise
from fedloom.sharing.plan import Tensors


class StackProgram:
    """Weights, moments and loss sums for up to ``size`` silos of a stack; a chunk uses the first slots."""

    def __init__(
        self,
        stack: Stack,
        size: int,
        trials: Sequence[PhaseTrial],
        precision: Precision,
        compiled: bool,
        lanes: int = 0,
    ) -> None:
        self._stack, self._phases, self.size = stack, stack.kind.phases, size
        self._device, self._batch = stack.device, stack.kind.local.batch_size
        stack.table.reserve(size)
        # Of all silos at once gradients come out as a trial's did; in lanes, compiled, as the parameters lie.
        layouts = {} if lanes else {name: part for trial in trials for name, part in trial.gradients.items()}
        self.weights = {
            name: laid_out(layouts.get(name, tensor), size) for name, tensor in stack.model.state_dict().items()
        }
        self._constants = {n: laid_out(t, size) for n, t in stack.constants[stack.members[0]].items()}
        sent = tuple(f"{block}." for block in stack.kind.sent)
        self._received = {n: torch.zeros_like(t) for n, t in self.weights.items() if sent and n.startswith(sent)}
        phases = self._phases
        self._trained = [tuple(trial.gradients) for trial in trials]
        # In lanes the silos' networks are large: to compile an optimiser of so many tensors takes longer than it saves.
        quick_moves = compiled and not lanes
        self._state = LocalState(
            phases,
            self.weights,
            self._trained,
            self._received,
            stack.kind.privacy,
            quick_moves,
            stack.kind.compressed,
        )
        self._terms = [
            tuple(f"{phase.name}/{term}" for term in trial.terms) for phase, trial in zip(phases, trials, strict=True)
        ]
        self._sums = [torch.zeros(len(terms), size, device=self._device) for terms in self._terms]
        self.reads_context = any(trial.looked_at for trial in trials)  # a recording holds on to what it has read
        # Wrapped: a compiler may take the numbers of a plain one for constants, and compile anew in every round.
        self._context = WatchedContext(RoundContext(0, 0, ()))
        self._secrets: Sequence[StreamNoise] = ()
        self._round = 0
        self.training = tuple(range(len(phases)))  # phases that do so in this round
        batching = Batching(stack.model, self._now, precision, compiled, lanes > 0)
        self._gradients = self._by_phase(batching, lanes)

    def _by_phase(self, batching: Batching, lanes: int) -> list[Gradients]:
        """How each phase's gradients are found: of all silos at once, or of each by itself."""
        stack, phases = self._stack, list(zip(self._phases, self._trained, strict=True))
        if not lanes:
            return [gradients_of_stack(stack, phase, batching, trained) for phase, trained in phases]
        side_by_side = Lanes(self._device, lanes)
        room = {name: torch.zeros_like(self.weights[name]) for trained in self._trained for name in trained}
        return [LanedGradients(stack, phase, batching, trained, side_by_side, room) for phase, trained in phases]

    def begin(self, context: RoundContext, secrets: Sequence[StreamNoise]) -> None:
        """A new round, and under a mechanism what hides the records of each member of a chunk."""
        self._context, self._secrets, self._round = WatchedContext(context), secrets, context.round
        self._state.begin(context)
        self.training = tuple(n for n, phase in enumerate(self._phases) if phase.trains_in(context))

    def _now(self) -> RoundContext:
        return cast("RoundContext", self._context)

    def schedule(self, members: Sequence[Member]) -> Stretches:
        """What the members of a chunk do in the round."""
        return EpochBatches(self._crew(members, [len(member.silo) for member in members]))

    def _crew(self, members: Sequence[Member], sizes: Sequence[int]) -> Crew:
        return Crew(
            self._phases,
            self._batch,
            self._round,
            [member.steps for member in members],
            [member.index for member in members],
            self._stack.table.load([member.silo for member in members]),
            sizes,
            [member.trainer.config.seed for member in members],
            self._device,
        )

    @property
    def numbers_per_step(self) -> int:
        """How many numbers a window holds for each step of a silo."""
        return numbers_per_step(self._phases, self._batch)

    def buffers(self, steps: int) -> tuple[Any, ...]:
        """Room for the inputs of so many steps."""
        return buffers(self._phases, self._batch, steps, self.size, self._device)

    def draw(self, silos: int) -> None:
        """Get ready for a step of the first ``silos`` silos whatever must not be recorded; nothing here."""

    def load(self, members: Sequence[Member], states: Sequence[FederationState]) -> None:
        """Give each slot what its silo was sent, what it kept, and in its first round fresh private weights."""
        self._clear()
        received: dict[tuple[Any, ...], tuple[Tensors, list[int]]] = {}
        for position, (member, state) in enumerate(zip(members, states, strict=True)):
            plan = member.trainer.method.plan
            keys = (key for block in self._stack.kind.sent for key in plan.prefixes(block, member.site).values())
            source = (member.run, *keys)  # all silos with this one are sent the same
            if source not in received:
                received[source] = received_by(plan, state.server, member.site), []
            received[source][1].append(position)
        for tensors, positions in received.values():
            slots = torch.tensor(positions, device=self._device)
            for name, tensor in tensors.items():
                self.weights[name][slots] = tensor.to(self._device, non_blocking=True)
        for name, tensor in self._received.items():
            tensor.copy_(self.weights[name])
        for position, (member, state) in enumerate(zip(members, states, strict=True)):
            for name, tensor in self._constants.items():
                tensor[position] = self._stack.constants[member][name]
            kept = state.silos.get(member.index, SiloState()).tensors
            trainer = member.trainer
            self._state.load(position, kept, trainer.method, member.site, trainer.streams)

    def _clear(self) -> None:
        for optimizer in self._state.optimizers:
            optimizer.reset()
        for total in self._sums:
            total.zero_()

    def step(self, inputs: tuple[Any, ...]) -> None:
        """One step of every phase for the first ``len(index)`` silos, given index, mask and each phase's noise."""
        index, mask, noise = inputs
        silos = len(index)
        received = {name: tensor[:silos] for name, tensor in self._received.items()}
        for number in self.training:
            gradients, means = self._gradients[number](self._lent(silos), index, mask, noise[number], received)
            self._state.optimizers[number].step(silos, gradients)
            self._sums[number][:, :silos].add_(means)

    def _lent(self, silos: int) -> Tensors:
        """What the models of the first ``silos`` silos are lent for a step."""
        return {name: tensor[:silos] for name, tensor in {**self.weights, **self._constants}.items()}

    def settle(self, silos: int) -> Tensors:
        """What becomes of the weights of each of the first ``silos`` silos after its last step.

        By the method, and by the codes in which they are sent, which are returned.
        """
        if (settle := self._stack.kind.settle) is not unchanged:
            for name, tensor in vmap(settle)({n: t[:silos].clone() for n, t in self.weights.items()}).items():
                self.weights[name][:silos] = tensor
        return self._state.compress(self._received, silos)

    def terms(self, steps: Sequence[int]) -> list[dict[str, float]]:
        """The mean of each loss term over each silo's steps."""
        names = [name for number in self.training for name in self._terms[number]]
        sums = torch.cat([self._sums[number] for number in self.training]).t()[: len(steps)].tolist()
        return [
            {name: total / count for name, total in zip(names, row, strict=True)}
            for row, count in zip(sums, steps, strict=True)
        ]

    def kept(self, silos: int) -> list[SiloState]:
        """What each of the first ``silos`` silos keeps until its next round, on the host."""
        return self._state.kept(silos)
