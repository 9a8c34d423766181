"""The memory of one stack on one device, and the step that runs in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap

from fedloom.engines.base import SiloState, received_by
from fedloom.engines.fused_batches import Schedule, Stretches, buffers, numbers_per_step
from fedloom.engines.fused_stack import Stack, positions_by
from fedloom.engines.fused_step import Precision, StackedOptimizer, WatchedContext, evaluation, laid_out
from fedloom.engines.fused_support import Trial
from fedloom.engines.training import MODEL, OPTIMIZER, Trainer
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import ServerState, fresh_blocks, unchanged
from fedloom.privacy.mechanism import NoPrivacy
from fedloom.sharing.plan import Down


class StackProgram:
    """Weights, moments and loss sums for up to ``size`` silos of a stack; a chunk uses the first places."""

    def __init__(
        self, trainer: Trainer, stack: Stack, size: int, trials: Sequence[Trial], precision: Precision, compiled: bool
    ) -> None:
        self._trainer, self._stack, self.size = trainer, stack, size
        layouts = {name: gradient for trial in trials for name, gradient in trial.gradients.items()}
        self.weights = {
            name: laid_out(layouts.get(name, tensor), size) for name, tensor in stack.model.state_dict().items()
        }
        sent = tuple(f"{b}." for b, rule in trainer.method.plan.blocks.items() if rule.down is not Down.NOTHING)
        self._received = {n: torch.zeros_like(t) for n, t in self.weights.items() if sent and n.startswith(sent)}
        phases = trainer.method.phases
        self._optimizers = [
            StackedOptimizer(phase.optimizer, {name: self.weights[name] for name in trial.gradients}, compiled)
            for phase, trial in zip(phases, trials, strict=True)
        ]
        self._trained = [tuple(trial.gradients) for trial in trials]
        self._terms = [
            tuple(f"{phase.name}/{term}" for term in trial.terms) for phase, trial in zip(phases, trials, strict=True)
        ]
        self._sums = [torch.zeros(len(terms), size, device=stack.records.x.device) for terms in self._terms]
        self._context = WatchedContext(RoundContext(0, 0, ()))
        self._evaluate = [
            evaluation(stack, phase, lambda: cast("RoundContext", self._context), precision, compiled)
            for phase in phases
        ]

    @property
    def reads_context(self) -> bool:
        """Whether a step looked at the round's context since :meth:`begin`."""
        return self._context.was_read

    def begin(self, context: RoundContext, silos: Sequence[int]) -> None:  # noqa: ARG002 - of one kind here
        """A new round, and the silos of a chunk."""
        self._context = WatchedContext(context)

    def schedule(self, silos: Sequence[int], round: int, limit: int | None) -> Stretches:
        """What the silos of a chunk do in a round."""
        return Schedule(self._trainer, self._stack, silos, round, limit)

    @property
    def numbers_per_step(self) -> int:
        """How many numbers a window holds for each step of a silo."""
        return numbers_per_step(self._trainer)

    def buffers(self, steps: int) -> tuple[Any, ...]:
        """Room for the inputs of so many steps."""
        return buffers(self._trainer, steps, self.size, self._stack.records.x.device)

    def draw(self, silos: int) -> None:
        """Get ready for a step of the first ``silos`` silos whatever must not be recorded; nothing here."""

    def load(self, server: ServerState, sites: list[Site], states: list[SiloState]) -> None:
        """Give each place what its silo was sent, what it kept, and in its first round fresh private weights."""
        plan, method = self._trainer.method.plan, self._trainer.method
        self._clear()

        def sources(site: Site) -> tuple[str, ...]:
            sent = (block for block, rule in plan.blocks.items() if rule.down is not Down.NOTHING)
            return tuple(str(key) for block in sent for key in plan.prefixes(block, site).values())

        for positions in positions_by(sources, sites).values():
            places = torch.tensor(positions, device=self._stack.records.x.device)
            for name, tensor in received_by(plan, server, sites[positions[0]]).items():
                self.weights[name][places] = tensor.to(places.device)
        for name, tensor in self._received.items():
            tensor.copy_(self.weights[name])
        private = set(self.weights) - set(self._received)
        for position, (site, state) in enumerate(zip(sites, states, strict=True)):
            kept = {n.removeprefix(MODEL): t for n, t in state.tensors.items() if n.startswith(MODEL)}
            if private - set(kept):
                kept = plan.join(fresh_blocks(method, site, self._trainer.streams), site) | kept
            for name in private:
                self.weights[name][position] = kept[name]
            for phase, optimizer in zip(method.phases, self._optimizers, strict=True):
                prefix = f"{OPTIMIZER}{phase.name}/"
                moments = {n.removeprefix(prefix): t for n, t in state.tensors.items() if n.startswith(prefix)}
                if moments:
                    optimizer.load(position, moments)

    def _clear(self) -> None:
        for optimizer in self._optimizers:
            optimizer.reset()
        for total in self._sums:
            total.zero_()

    def step(self, inputs: tuple[Any, ...]) -> None:
        """One step of every phase for the first ``len(index)`` silos, given index, mask and each phase's noise."""
        index, mask, noise = inputs
        silos = len(index)
        received = {name: tensor[:silos] for name, tensor in self._received.items()}
        for number, phase in enumerate(self._trainer.method.phases):
            weights = {name: tensor[:silos] for name, tensor in self.weights.items()}
            leaves = {name: weights[name].detach().requires_grad_() for name in self._trained[number]}
            losses, means = self._evaluate[number]({**weights, **leaves}, index, mask, noise[number], received)
            mechanism = self._trainer.method.mechanism if phase.touches_records else NoPrivacy()
            gradients = mechanism.gradients(losses, mask, list(leaves.values()))
            self._optimizers[number].step(silos, gradients)
            self._sums[number][:, :silos] += means

    def settle(self, silos: int) -> None:
        """What the method does to the weights of each of the first ``silos`` silos after its last step."""
        if (settle := self._trainer.method.settle) is unchanged:
            return
        for name, tensor in vmap(settle)({n: t[:silos].clone() for n, t in self.weights.items()}).items():
            self.weights[name][:silos] = tensor

    def terms(self, steps: Sequence[int]) -> list[dict[str, float]]:
        """The mean of each loss term over each silo's steps."""
        names = [name for terms in self._terms for name in terms]
        sums = torch.cat(self._sums).t()[: len(steps)].tolist()
        return [
            {name: total / count for name, total in zip(names, row, strict=True)}
            for row, count in zip(sums, steps, strict=True)
        ]

    def kept(self, silos: int) -> list[SiloState]:
        """What each of the first ``silos`` silos keeps until its next round, on the host."""
        stacked = {MODEL + n: t[:silos].cpu() for n, t in self.weights.items() if n not in self._received}
        for phase, optimizer in zip(self._trainer.method.phases, self._optimizers, strict=True):
            if phase.optimizer.keep:
                stacked |= {f"{OPTIMIZER}{phase.name}/{name}": t for name, t in optimizer.kept(silos).items()}
        # Copied, so that one silo's state does not hold the memory of a whole chunk; contiguous, as others expect it.
        rows = ({name: _copied(tensor[i]) for name, tensor in stacked.items()} for i in range(silos))
        return [SiloState(row) for row in rows]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
