"""What becomes of a chunk: every update passes the egress guard, is merged into its own run, and is reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedloom.engines.base import Job, Outcome, Result, School, SiloState, conclude, settled
from fedloom.engines.fused_merge import StackedMean, Sum
from fedloom.engines.fused_stack import Member
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError
from fedloom.methods.base import Mean, ServerState
from fedloom.sharing.plan import Tensors
from fedloom.sharing.update import Update, check_update, pass_egress


@dataclass(frozen=True, eq=False)
class Trained:
    """What training left at one place of a stack."""

    member: Member
    position: int
    steps: int
    terms: dict[str, float]
    kept: SiloState
    finite: bool  # whether all its weights are


@dataclass(frozen=True, eq=False)
class Part:
    """What a chunk brings to one run."""

    results: list[Result]  # their tensors are views of the stack, which the next chunk overwrites
    sums: list[Sum]


class RunRound:
    """The round of one run, under way."""

    def __init__(self, trainer: Trainer, job: Job, trial: bool = False) -> None:
        self.job, self._trainer, self._trial = job, trainer, trial
        self.results: list[Result] = []
        self.error: FedloomError | None = None
        totals: dict[str, float] = {}
        for index in job.context.participants:
            for owner, count in trainer.weights(trainer.federation.silos[index]).items():
                totals[owner] = totals.get(owner, 0.0) + count
        step = trainer.method.server_step
        # Any other server step sees the updates themselves, as in every engine.
        self._mean = StackedMean(step, totals) if not trial and type(step) is Mean else None

    def gathered(self, trained: Sequence[Trained], weights: Tensors) -> Part:
        """What this run gets of a chunk; a mistake in it is kept as the run's own."""
        try:
            results = [self._result(found, weights) for found in trained]
        except FedloomError as error:
            self.error = error
            return Part([], [])
        if self._mean is None:
            return Part(results, [])
        positions, sites = [found.position for found in trained], [found.member.site for found in trained]
        return Part(results, self._mean.sums(weights, positions, sites, [result.update for result in results]))

    def take(self, part: Part, seconds: float) -> None:
        """Add what a chunk brought; each of its silos took so many seconds."""
        if self._mean is not None:
            self._mean.take(part.sums)
        for result in part.results:
            blocks = {
                key: {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in block.items()}
                for key, block in ({} if self._mean is not None else result.update.blocks).items()
            }
            result = replace(result, update=replace(result.update, blocks=blocks), seconds=seconds)
            self.results.append(result)
            self.job.on_silo(result)

    def concluded(self, school: School) -> Outcome:
        """The server's half of the round; whatever it has to learn it learns at ``school``."""
        if self.error is not None:
            return self.error
        state, context = self.job.state, self.job.context
        if self._mean is None:
            try:
                return conclude(self._trainer.method, state, context, self.results, self._trainer.streams, school)
            except FedloomError as error:
                return error
        server = ServerState({**state.server.blocks, **self._mean.result()}, state.server.memory)
        return settled(state, context, server, self.results)

    def _result(self, found: Trained, weights: Tensors) -> Result:
        """The update passes the egress guard and the server's look at it."""
        plan, silo, site = self._trainer.method.plan, found.member.silo, found.member.site
        mine = {name: tensor[found.position] for name, tensor in weights.items()}
        parts = plan.split(mine, site)
        update = Update(
            silo=silo.name,
            round=self.job.context.round,
            blocks={key: part for key, part in parts.items() if plan.blocks[key.block].up},
            weights=found.member.records,
            payloads={} if self._trial else self._trainer.payloads(found.member.index, mine, self.job.context),
        )
        egress = pass_egress(update, plan, site, parts)
        if not found.finite or update.payloads:
            check_update(update, self.job.state.server.blocks)
        return Result(found.member.index, update, egress, found.kept, found.terms, found.steps, 0.0)
