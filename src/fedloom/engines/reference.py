"""The reference engine: silo after silo, or spread over workers with equal results."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import torch

from fedloom.engines.base import (
    NO_SECRETS,
    FederationState,
    Job,
    Result,
    RoundReport,
    Secrets,
    SiloState,
    Task,
    conclude,
    finished,
    received_by,
    site_of,
)
from fedloom.engines.distillation import distillation_context, distillation_trainer, distilled, state_before
from fedloom.engines.distributed import takes_step_with_sum
from fedloom.engines.masked_sums import MaskedSum, SummedRounds, stepped_by
from fedloom.engines.pieces import RoundPart, RoundPiece
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError
from fedloom.federation.rounds import RoundContext
from fedloom.methods.steps import DistillationJob, Distilled
from fedloom.sharing.codec import RECEIVED, STATE, flat, packed, parts, placed, under, unpacked

ALLOCATOR = "DefaultCPUAllocator"  # torch's, when it finds no memory

_trainer: Trainer  # in a worker process: set once, before any task


class ReferenceEngine:
    """The plain loop over silos."""

    def __init__(
        self,
        trainer: Trainer,
        workers: int = 1,
        threads: int = 1,
        kind: Literal["process", "thread"] = "process",
    ) -> None:
        """``kind`` of workers: threads start at once, but take turns in Python; processes take seconds to start."""
        self._trainer = trainer
        self.workers, self.threads, self.kind = workers, threads, kind
        self._pool: Executor | None = None
        if workers > 1 and kind == "thread":
            self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        elif workers > 1:
            # Spawned, not forked: a fork would inherit the locks of torch's threads.
            self._pool = ProcessPoolExecutor(
                workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(trainer,),
            )
        torch.set_num_threads(threads)

    def describe(self) -> str:
        """Workers and threads."""
        if self.workers > 1:
            return f"reference, {self.workers} worker {'processes' if self.kind == 'process' else 'threads'}"
        return f"reference, 1 worker x {self.threads} thread" + ("" if self.threads == 1 else "s")

    def choice(self) -> dict[str, Any]:
        """The number of threads may change the last bit; the number of workers does not."""
        return {"name": "reference", "device": "cpu", "threads": self.threads}

    def round(self, job: Job) -> tuple[FederationState, RoundReport]:
        """Steps 2 to 6 of a round's life."""
        return self.concluded(job, self.carry_out(job, range(len(job.context.participants))))

    def pieces(self, job: Job) -> list[RoundPiece]:
        """Each silo trains by itself."""
        return [RoundPiece((silo,), self._trainer.steps(silo)) for silo in job.context.participants]

    def carry_out(self, job: Job, pieces: Sequence[int]) -> list[RoundPart]:
        """Train silos, whose updates are whole."""
        summed = self._sum(job.context.round)
        numbers = {job.context.participants[number]: number for number in pieces}
        found = []
        with _memory_named():
            tasks = self.tasks(job.state, replace(job.context, participants=tuple(numbers)), job.secrets)
            tasks = [replace(task, context=job.context, step=summed.step if summed else None) for task in tasks]
            for result in self.train(tasks):
                job.on_silo(result)
                found.append(RoundPart(numbers[result.silo], [result]))
        return found

    def concluded(self, job: Job, parts: Sequence[RoundPart]) -> tuple[FederationState, RoundReport]:
        """Merge the updates, or take the step that needs but their sum."""
        trainer, summed = self._trainer, self._sum(job.context.round)
        results = [result for part in parts for result in part.results]
        with _memory_named():
            if summed is None or not results:
                return conclude(trainer.method, job.state, job.context, results, trainer.streams, distiller=self)
            total = np.sum([summed.integers(result.update) for result in results], axis=0)
            found = stepped_by(trainer, trainer.method, summed.update(total, job.context.round), job.state, job.context)
            return finished(trainer.method, job.state, job.context, results, found, self)

    def _sum(self, round: int) -> MaskedSum | None:
        """What silos add up in a round whose step is taken with the sum."""
        trainer = self._trainer
        if not takes_step_with_sum(trainer.method, trainer.privacy):
            return None
        return SummedRounds(trainer.config, trainer.federation, trainer.method, trainer.privacy[0]).of(round)

    @property
    def device(self) -> torch.device:
        """Where a server learns."""
        return torch.device("cpu")

    def distil(self, distillation: DistillationJob) -> Distilled:
        """A server's distillation, in this process."""
        trainer = distillation_trainer(self._trainer.config, distillation)
        return distilled(trainer.train(Task(0, distillation_context(distillation), {}, state_before(distillation))))

    def tasks(self, state: FederationState, context: RoundContext, secrets: Secrets = NO_SECRETS) -> list[Task]:
        """What each participant is sent and has kept."""
        plan, federation, privacy = self._trainer.method.plan, self._trainer.federation, self._trainer.privacy
        return [
            Task(
                silo=index,
                context=context,
                received=received_by(plan, state.server, site_of(federation, index)),
                state=state.silos.get(index, SiloState()),
                mechanism=privacy[index].mechanism(context.round) if privacy else None,
                secret=secrets.get(index),
            )
            for index in context.participants
        ]

    def train(self, tasks: list[Task]) -> Iterator[Result]:
        """Results as they come in."""
        torch.set_num_threads(self.threads)  # another engine may have been tried in between
        if self._pool is None:
            yield from map(self._trainer.train, tasks)
            return
        # Largest silos first, so that no worker is left with a long one at the end.
        tasks = sorted(tasks, key=lambda task: -len(self._trainer.federation.silos[task.silo]))
        if self.kind == "thread":
            for done in as_completed([self._pool.submit(self._trainer.train, task) for task in tasks]):
                yield done.result()
            return
        with _hidden_main():
            futures: list[Future[tuple[Result, bytes]]] = [
                self._pool.submit(_train_in_worker, *_packed(task)) for task in tasks
            ]
        try:
            for future in as_completed(futures):
                yield _unpacked(*future.result())
        except BrokenProcessPool as error:
            raise FedloomError(
                "a worker process died; resume the run, with engine.workers=1 if memory ran out"
            ) from error

    def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _memory_named() -> Iterator[None]:
    """Say in a sentence that there is too little; torch has no class of its own for that on a CPU."""
    try:
        yield
    except RuntimeError as error:
        if ALLOCATOR not in str(error):
            raise
        raise FedloomError(
            "a silo's training does not fit into this machine's memory: take a smaller local.batch_size, smaller "
            "images, or, for a flow, less engine.pass_memory"
        ) from error


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Workers need nothing of the user's script: keep a spawned process from running it a second time."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_worker(trainer: Trainer) -> None:
    global _trainer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main one alone answers it
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    _trainer = trainer


# Tensors cross the process boundary as safetensors bytes, never as pickled or shared storage; the rest is plain values.


def _packed(task: Task) -> tuple[Task, bytes]:
    tensors = placed(RECEIVED, task.received) | placed(STATE, task.state.tensors)
    return replace(task, received={}, state=SiloState()), packed(tensors)


def _train_in_worker(task: Task, data: bytes) -> tuple[Result, bytes]:
    tensors = unpacked(data, "a task")
    given = replace(task, received=under(RECEIVED, tensors), state=SiloState(under(STATE, tensors)))
    result = _trainer.train(given)
    update = replace(result.update, coded={})  # for those who send it further
    tensors = flat("", update.parts) | placed(STATE, result.state.tensors)
    return replace(result, update=update.holding({}), state=SiloState()), packed(tensors)


def _unpacked(result: Result, data: bytes) -> Result:
    tensors = unpacked(data, "a result")
    left = {name: tensor for name, tensor in tensors.items() if not name.startswith(STATE)}
    return replace(
        result,
        update=result.update.holding(parts("", left, str)),
        state=SiloState(under(STATE, tensors)),
        egress=replace(result.egress, sha256=sha256(data).hexdigest()),
    )
