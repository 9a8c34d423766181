"""Distillations of several runs, learned together by a fused engine of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fedloom.config import Config
from fedloom.engines.base import FederationState, Job
from fedloom.engines.distillation import distillation_context, distillation_trainer, distilled, state_before
from fedloom.engines.training import Trainer
from fedloom.methods.steps import DistillationJob, Distilled, ServerState

if TYPE_CHECKING:
    from fedloom.engines.fused import FusedEngine


class DistillationPool:
    """Where the servers of runs learn, together: an engine of its own, which goes on from round to round."""

    def __init__(self, configs: Sequence[Config], make: Callable[[Sequence[Trainer]], FusedEngine]) -> None:
        self._configs, self._make = configs, make
        self._engine: FusedEngine | None = None
        self._slots: dict[int, int] = {}  # of runs in that engine

    def distil(self, jobs: Mapping[int, DistillationJob]) -> dict[int, Distilled | Exception]:
        """Local training of one more site for each run; distillations that compute the same function share a stack."""
        try:
            return self._distilled_together(jobs)
        except Exception as error:
            self.close()
            if len(jobs) == 1:
                return dict.fromkeys(jobs, error)
        # Whoever's fault it was, the distillations of the others do without theirs.
        return {run: self.distil({run: job})[run] for run, job in jobs.items()}

    def _distilled_together(self, jobs: Mapping[int, DistillationJob]) -> dict[int, Distilled | Exception]:
        engine = self._engine if self._refilled(jobs) else self._made_for(jobs)
        assert engine is not None
        tasks = {}
        for run, job in jobs.items():
            start = FederationState(0, ServerState({}), {0: state_before(job)})
            tasks[self._slots[run]] = Job(start, distillation_context(job), lambda _: None)
        outcomes = engine.train_together(tasks)
        found = {run: outcomes[self._slots[run]] for run in jobs}
        return {run: came if isinstance(came, Exception) else distilled(came[0]) for run, came in found.items()}

    def _refilled(self, jobs: Mapping[int, DistillationJob]) -> bool:
        """Whether the engine that there is can go on with other records, which it then has."""
        if self._engine is None or not jobs.keys() <= self._slots.keys():
            return False
        return self._engine.refilled({self._slots[run]: job.records for run, job in jobs.items()})

    def _made_for(self, jobs: Mapping[int, DistillationJob]) -> FusedEngine:
        self.close()  # before more memory is taken
        self._engine = self._make([distillation_trainer(self._configs[run], job) for run, job in jobs.items()])
        self._slots = {run: slot for slot, run in enumerate(jobs)}
        return self._engine

    def close(self) -> None:
        """Give the device's memory back."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
