"""What becomes of a chunk: every update passes the egress guard, is merged into its own run, and is reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedloom.engines.base import Job, Outcome, Result, SiloState, Task, settled, stepped
from fedloom.engines.fused_merge import StackedMean, on_host
from fedloom.engines.fused_stack import Member
from fedloom.engines.pieces import RoundPart, Sum
from fedloom.errors import FedloomError
from fedloom.methods.steps import DistillationJob, Distilled, Stepped
from fedloom.outline import in_outline
from fedloom.privacy.noise import StreamNoise
from fedloom.sharing.aggregation import totals_of
from fedloom.sharing.plan import Seen, Tensors
from fedloom.sharing.update import check_update


@dataclass(frozen=True, eq=False)
class Slot:
    """Where in a stack a member trains, and for how many steps."""

    member: Member
    position: int
    steps: int


@dataclass(frozen=True, eq=False)
class Trained:
    """What training left at a slot; to know it is to wait for the device."""

    terms: dict[str, float]
    kept: SiloState
    finite: bool  # whether all its weights are


@dataclass(frozen=True, eq=False)
class RunShare:
    """What a chunk brings to one run."""

    __repr__ = in_outline

    slots: Sequence[Slot]
    # Without what has to be waited for; their tensors are views of the stack, which the next chunk overwrites.
    results: list[Result]
    sums: list[Sum]


class RunRound:
    """The round of one run, under way."""

    def __init__(self, members: Sequence[Member], job: Job, trial: bool = False) -> None:
        """``members`` are all silos of the run, in the order of its federation."""
        self.job, self._trial = job, trial
        self._trainer = trainer = members[0].trainer
        self.results: list[Result] = []
        self.parts: list[RoundPart] | None = None  # where they are to be put together elsewhere: those of each chunk
        self.error: FedloomError | None = None
        self._stepped = Stepped(job.state.server)
        method = trainer.method
        # Where sums will do, they are formed on the device; else the updates themselves travel, as in every engine.
        sums = method.aggregator.merge.needs is Seen.SUM and not method.server_step.needs_each
        totals = totals_of([trainer.counts(index) for index in job.context.participants])
        self._mean = StackedMean(method.plan, method.aggregator, totals) if not trial and sums else None

    def gathered(self, slots: Sequence[Slot], weights: Tensors, codes: Tensors) -> RunShare:
        """What this run gets of a chunk; a mistake in it is kept as the run's own."""
        try:
            results = [self._result(slot, weights, codes) for slot in slots]
        except FedloomError as error:
            self.error = error
            return RunShare([], [], [])
        sums: list[Sum] = []
        if self._mean is not None:
            positions, sites = [slot.position for slot in slots], [slot.member.site for slot in slots]
            sums = self._mean.sums(weights, positions, sites, [result.update for result in results])
        return RunShare(slots, results, sums)

    def take(self, part: RunShare, trained: Sequence[Trained], seconds: float) -> None:
        """Add what a chunk brought; each of its silos took so many seconds."""
        try:
            for slot, result in zip(part.slots, part.results, strict=True):
                if not trained[slot.position].finite:
                    check_update(result.update, self.job.state.server.blocks)
        except FedloomError as error:
            self.error = error
            return
        before = len(self.results)
        if self._mean is not None and self.parts is None:
            self._mean.take(part.sums)
        for slot, result in zip(part.slots, part.results, strict=True):
            found = trained[slot.position]
            blocks = {
                key: {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in block.items()}
                for key, block in ({} if self._mean is not None else result.update.blocks).items()
            }
            update = replace(result.update, blocks=blocks, coded={})
            whole = replace(result, update=update, state=found.kept, terms=found.terms, seconds=seconds)
            self.results.append(whole)
            self.job.on_silo(whole)
        if self.parts is not None:
            sums = [(key, weight, on_host(tensors)) for key, weight, tensors in part.sums]
            self.parts.append(RoundPart(len(self.parts), self.results[before:], sums))

    def put_together(self, parts: Sequence[RoundPart]) -> None:
        """Take what came of chunks on other ranks, and here, in the order of the chunks."""
        for part in parts:
            self.results += part.results
            if self._mean is not None:
                self._mean.take(part.sums)

    def secret(self, silo: int) -> StreamNoise:
        """What a silo's records are drawn and hidden by in this round."""
        found = self._trainer.randomness(self.job.secrets.get(silo), trial=self._trial)
        assert isinstance(found, StreamNoise), "silos that train together draw from streams"
        return found

    @property
    def distillation(self) -> DistillationJob | None:
        """What the server has to learn, known after its step."""
        return self._stepped.distillation

    def step(self, device: torch.device) -> None:
        """The server step; a distillation that follows from it is prepared on ``device``."""
        if self.error is not None:
            return
        state, context, trainer = self.job.state, self.job.context, self._trainer
        merged = self._mean.result(state.server.blocks) if self._mean is not None else {}
        try:
            self._stepped = stepped(trainer.method, state, context, self.results, trainer.streams, device, merged)
        except FedloomError as error:
            self.error = error

    def concluded(self, distilled: Distilled | Exception | None) -> Outcome:
        """The end of the round, given what came of its distillation if it had one."""
        if self.error is not None:
            return self.error
        if isinstance(distilled, Exception):
            return distilled
        return settled(self._trainer.method, self.job.state, self.job.context, self.results, self._stepped, distilled)

    def _result(self, slot: Slot, weights: Tensors, codes: Tensors) -> Result:
        """What leaves a slot, without what has to be waited for."""
        mine, coded = ({name: each[slot.position] for name, each in table.items()} for table in (weights, codes))
        silo, limit = slot.member.index, 0 if self._trial else None
        secret = self.job.secrets.get(silo)
        task = Task(silo, self.job.context, {}, SiloState(), step_limit=limit, secret=secret)
        update, egress = self._trainer.sent(task, mine, coded)
        if update.payloads:
            check_update(update, self.job.state.server.blocks)
        return Result(silo, update, egress, SiloState(), {}, slot.steps, 0.0)
