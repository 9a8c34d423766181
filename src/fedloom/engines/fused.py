"""The fused engine: all silos of a round in one batched program; what is learned equals the reference engine's.

Several runs may share an engine: silos that compute the same function train in one stack, whichever run they are of.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedloom.engines.base import FederationState, Job, Outcome, Result, RoundReport
from fedloom.engines.fused_batches import Schedule, numbers_per_step
from fedloom.engines.fused_layers import rewritten
from fedloom.engines.fused_program import StackProgram
from fedloom.engines.fused_results import RunRound, Trained
from fedloom.engines.fused_runner import GraphRunner, PlainRunner, Runner
from fedloom.engines.fused_stack import Member, Stack, stacks_of
from fedloom.engines.fused_step import Precision
from fedloom.engines.fused_support import UnsupportedError, finite_rows, tried
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError, FedloomWarning
from fedloom.federation.rounds import RoundContext

CUDA_CHUNK = 128  # silos at once: more gain nothing, and memory stays bounded however many silos there are
WINDOW_NUMBERS = {"cpu": 2**21, "cuda": 2**26}  # of batch order and noise drawn at once


@dataclass(frozen=True)
class FusedOptions:
    """Where and how; none of it changes what is learned beyond rounding."""

    device: torch.device
    precision: Precision = "float32"
    chunk: int = CUDA_CHUNK
    matrix_convolutions: bool = True
    compiled: bool = False


class FusedEngine:
    """Stacks of silos, chunk after chunk."""

    def __init__(self, trainer: Trainer, options: FusedOptions, packed: Sequence[Trainer] = ()) -> None:
        self._trainers, self._options = (trainer, *packed), options
        if any(trainer.privacy for trainer in self._trainers):
            raise UnsupportedError("privacy.mechanism = 'dp-sgd' is not built into the fused engine yet")
        for trainer in self._trainers:
            if not trainer.method.phases:
                raise UnsupportedError(f"method '{trainer.method.name}' trains nothing at the silos")
        self.chunk = options.chunk
        self._stacks = stacks_of(self._trainers, options.device)
        self.convolutions = sum(rewritten(stack.model, options.matrix_convolutions) for stack in self._stacks)
        self._trials = [tried(stack) for stack in self._stacks]
        self._programs: dict[int, tuple[StackProgram, Runner]] = {}
        if options.device.type == "cpu":
            torch.set_num_threads(1)

    def describe(self) -> str:
        """Device, precision, and how the silos are batched."""
        device = self._options.device
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        stacks = f"{len(self._stacks)} stack" + ("" if len(self._stacks) == 1 else "s")
        parts = [f"fused on {where}", self._options.precision, f"{stacks} of up to {self.chunk} silos"]
        if len(self._trainers) > 1:
            parts.append(f"{len(self._trainers)} runs packed")
        if self.convolutions:
            parts.append("convolutions " + ("as matrix products" if self._options.matrix_convolutions else "in groups"))
        if self._options.compiled:
            parts.append("compiled")
        return ", ".join(parts)

    def choice(self) -> dict[str, Any]:
        """How the silos are batched may change the last bit."""
        options = self._options
        return {
            "name": "fused",
            "device": options.device.type,
            "chunk": self.chunk,
            "matrix_convolutions": options.matrix_convolutions,
            "compiled": options.compiled,
        }

    def round(
        self, state: FederationState, context: RoundContext, on_silo: Callable[[Result], None]
    ) -> tuple[FederationState, RoundReport]:
        """Steps 2 to 6 of a round's life; the mean is taken on the device, chunk by chunk."""
        outcome = self.rounds({0: Job(state, context, on_silo)})[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def rounds(self, jobs: Mapping[int, Job]) -> dict[int, Outcome]:
        """The same round of several runs; what goes wrong in one of them is its outcome and leaves the others alone."""
        runs = {run: RunRound(self._trainers[run], job) for run, job in jobs.items()}
        self._train(runs)
        return {run: under_way.concluded() for run, under_way in runs.items()}

    def train(self, state: FederationState, context: RoundContext, step_limit: int | None = None) -> list[Result]:
        """The silos' half of a round of the first run, for trials."""
        under_way = RunRound(self._trainers[0], Job(state, context, lambda _: None), trial=True)
        self._train({0: under_way}, step_limit)
        return under_way.results

    def close(self) -> None:
        """Give the device's memory back."""
        self._programs.clear()
        if self._options.device.type == "cuda":
            torch.cuda.empty_cache()

    def _train(self, runs: Mapping[int, RunRound], step_limit: int | None = None) -> None:
        chosen = {run: set(under_way.job.context.participants) for run, under_way in runs.items()}
        for number, stack in enumerate(self._stacks):
            left = [member for member in stack.members if member.index in chosen.get(member.run, ())]
            left.sort(key=lambda member: (-member.steps, member.run, member.index))
            while left := [member for member in left if runs[member.run].error is None]:
                chunk = left[: self.chunk]
                try:
                    self._train_chunk(number, stack, chunk, runs, step_limit)
                except torch.OutOfMemoryError as error:
                    self._halve(error)
                    continue
                left = left[len(chunk) :]

    def _halve(self, error: Exception) -> None:
        if self.chunk == 1:
            raise FedloomError("a single silo's training does not fit into the device's memory") from error
        self.chunk //= 2
        self.close()
        warnings.warn(f"out of device memory: going on with {self.chunk} silos at once", FedloomWarning, stacklevel=2)

    def _program(self, number: int, stack: Stack) -> tuple[StackProgram, Runner]:
        """A stack's memory and its runner, made when they are first needed."""
        if number not in self._programs:
            options = self._options
            size = min(self.chunk, len(stack.members))
            program = StackProgram(stack, size, self._trials[number], options.precision, options.compiled)
            runner: Runner = PlainRunner(program, options.precision)
            if options.device.type == "cuda":
                steps = min(self._window(stack, size), max(member.steps for member in stack.members))
                runner = GraphRunner(program, options.precision, stack.kind, steps)
            self._programs[number] = program, runner
        return self._programs[number]

    def _window(self, stack: Stack, silos: int) -> int:
        """How many steps' worth of batches and noise are drawn at once."""
        return max(1, WINDOW_NUMBERS[self._options.device.type] // (silos * numbers_per_step(stack.kind)))

    def _train_chunk(
        self,
        number: int,
        stack: Stack,
        members: Sequence[Member],
        runs: Mapping[int, RunRound],
        step_limit: int | None,
    ) -> None:
        start = time.perf_counter()
        program, runner = self._program(number, stack)
        context = runs[members[0].run].job.context  # what an objective may see of it is the same in all of them
        schedule = Schedule(stack, members, context.round, step_limit)
        program.begin(context)
        runner.prepare(schedule.counts(), context.round)
        program.load(members, [runs[member.run].job.state for member in members])
        for window in schedule.windows(self._window(stack, program.size)):
            runner.run(window)
        trained = self._trained(program, members, schedule.steps)
        parts = [(runs[run], runs[run].gathered(found, program.weights)) for run, found in trained.items()]
        # Only now: a chunk that does not fit into memory leaves no half of itself behind.
        seconds = (time.perf_counter() - start) / len(members)
        for run, part in parts:
            run.take(part, seconds)

    @staticmethod
    def _trained(program: StackProgram, members: Sequence[Member], steps: Sequence[int]) -> dict[int, list[Trained]]:
        """What training left at each place, by run."""
        count = len(members)
        finite = finite_rows([tensor[:count] for tensor in program.weights.values()]).tolist()
        found = zip(members, range(count), steps, program.terms(steps), program.kept(count), finite, strict=True)
        by_run: dict[int, list[Trained]] = {}
        for trained in itertools.starmap(Trained, found):
            by_run.setdefault(trained.member.run, []).append(trained)
        return by_run
