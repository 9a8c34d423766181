"""The fused engine: all silos of a round in one batched program; what is learned equals the reference engine's."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedloom.engines.base import (
    FederationState,
    Result,
    RoundReport,
    SiloState,
    Taught,
    conclude,
    settled,
    site_of,
)
from fedloom.engines.fused_layers import rewritten
from fedloom.engines.fused_merge import StackedMean
from fedloom.engines.fused_private import PrivateProgram, probed
from fedloom.engines.fused_program import StackProgram
from fedloom.engines.fused_runner import GraphRunner, PlainRunner, Runner
from fedloom.engines.fused_stack import Stack, stacks_of
from fedloom.engines.fused_step import Precision
from fedloom.engines.fused_support import UnsupportedError, finite_rows, tried
from fedloom.engines.lessons import lesson_context, lesson_trainer, state_before, taught
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError, FedloomWarning
from fedloom.federation.records import Records
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Mean, ServerState
from fedloom.methods.distil import Lesson
from fedloom.sharing.update import Update, check_update, pass_egress

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
    host_noise: bool = False  # under DP-SGD draw noise as the reference engine does, also for a GPU, which is slow


class FusedEngine:
    """Stacks of silos, chunk after chunk."""

    def __init__(self, trainer: Trainer, options: FusedOptions, stacks: Sequence[Stack] | None = None) -> None:
        """``stacks`` that another engine has as well spare their records a second way to the device."""
        if trainer.config.privacy.pretraining:
            raise UnsupportedError("privacy.pretraining is not built into the fused engine")
        if not trainer.method.phases:
            raise UnsupportedError(f"method '{trainer.method.name}' trains nothing at the silos")
        self._trainer, self._options = trainer, options
        self.chunk = options.chunk
        stacks = stacks_of(trainer, options.device) if stacks is None else stacks
        # Layers are rewritten in place, and not alike in every engine.
        self._stacks = [replace(stack, model=copy.deepcopy(stack.model)) for stack in stacks]
        # Before layers are rewritten: what is put in their place has no rules for the gradients of examples.
        self._probes = [
            [probed(trainer, stack, phase) for phase in trainer.method.phases] if trainer.privacy else []
            for stack in self._stacks
        ]
        self.convolutions = sum(rewritten(stack.model, options.matrix_convolutions) for stack in self._stacks)
        self._trials = [tried(trainer, stack) for stack in self._stacks]
        self._programs: dict[int, tuple[StackProgram, Runner]] = {}
        self._classroom: FusedEngine | None = None
        if options.device.type == "cpu":
            torch.set_num_threads(1)

    def describe(self) -> str:
        """Device, precision, and how the silos are batched."""
        device = self._options.device
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        stacks = f"{len(self._stacks)} stack" + ("" if len(self._stacks) == 1 else "s")
        parts = [f"fused on {where}", self._options.precision, f"{stacks} of up to {self.chunk} silos"]
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
        method, silos = self._trainer.method, self._trainer.federation.silos
        totals: dict[str, float] = {}
        for index in context.participants:
            for owner, count in self._trainer.weights(silos[index]).items():
                totals[owner] = totals.get(owner, 0.0) + count
        # Any other server step sees the updates themselves, as in every engine.
        mean = StackedMean(method.server_step, totals) if type(method.server_step) is Mean else None
        results = []
        for result in self.train(state, context, mean):
            on_silo(result)
            results.append(result)
        if mean is None:
            return conclude(method, state, context, results, self._trainer.streams, school=self)
        server = ServerState({**state.server.blocks, **mean.result()}, state.server.memory)
        return settled(state, context, server, results)

    @property
    def device(self) -> torch.device:
        """Where the silos train and a server learns."""
        return self._options.device

    def teach(self, lesson: Lesson) -> Taught:
        """A server's lesson, in an engine of its own that goes on from round to round."""
        if self._classroom is None or not self._classroom.refilled(lesson.records):
            options = replace(self._options, chunk=1, compiled=False)
            self._classroom = FusedEngine(lesson_trainer(self._trainer.config, lesson), options)
        start = FederationState(0, ServerState({}), {0: state_before(lesson)})
        (result,) = self._classroom.train(start, lesson_context(lesson))
        return taught(result)

    def refilled(self, records: Records) -> bool:
        """Put other records in the place of a single stack's, if they are as many: what was recorded stays valid."""
        ours = self._stacks[0].records
        if len(ours) != len(records):
            return False
        for place, column in ((ours.x, records.x), (ours.y, records.y), (ours.group, records.group)):
            place.copy_(column)
        return True

    def train(
        self,
        state: FederationState,
        context: RoundContext,
        mean: StackedMean | None = None,
        step_limit: int | None = None,
    ) -> Iterator[Result]:
        """Results chunk by chunk; with ``mean`` the updates go there and the results come without them."""
        for number, stack in enumerate(self._stacks):
            left = sorted((i for i in context.participants if i in stack), key=lambda i: (-self._trainer.steps(i), i))
            while left:
                chunk = left[: self.chunk]
                try:
                    results = self._train_chunk(number, stack, chunk, state, context, mean, step_limit)
                except torch.OutOfMemoryError as error:
                    self._halve(error)
                    continue
                yield from results
                left = left[len(chunk) :]

    def close(self) -> None:
        """Give the device's memory back."""
        self._programs.clear()
        self._classroom = None
        if self._options.device.type == "cuda":
            torch.cuda.empty_cache()

    def _halve(self, error: Exception) -> None:
        if self.chunk == 1:
            raise FedloomError("a single silo's training does not fit into the device's memory") from error
        self.chunk //= 2
        self.close()
        warnings.warn(f"out of device memory: going on with {self.chunk} silos at once", FedloomWarning, stacklevel=2)

    def _program(self, number: int, stack: Stack) -> tuple[StackProgram, Runner]:
        """A stack's memory and its runner, made when they are first needed."""
        if number not in self._programs:
            trainer, options = self._trainer, self._options
            size = min(self.chunk, len(stack.silos))
            common = trainer, stack, size, self._trials[number], options.precision, options.compiled
            if trainer.privacy:
                program: StackProgram = PrivateProgram(*common, self._probes[number], options.host_noise)
            else:
                program = StackProgram(*common)
            runner: Runner = PlainRunner(program, options.precision)
            if options.device.type == "cuda":
                steps = min(self._window(program), max(map(trainer.steps, stack.silos)))
                runner = GraphRunner(program, options.precision, steps)
            self._programs[number] = program, runner
        return self._programs[number]

    def _window(self, program: StackProgram) -> int:
        """How many steps' worth of batches and noise are drawn at once."""
        return max(1, WINDOW_NUMBERS[self._options.device.type] // (program.size * program.numbers_per_step))

    def _train_chunk(
        self,
        number: int,
        stack: Stack,
        silos: list[int],
        state: FederationState,
        context: RoundContext,
        mean: StackedMean | None,
        step_limit: int | None,
    ) -> list[Result]:
        start = time.perf_counter()
        program, runner = self._program(number, stack)
        schedule = program.schedule(silos, context.round, step_limit)
        program.begin(context, silos)
        runner.prepare(schedule.counts(), context.round)
        sites = [site_of(self._trainer.federation, silo) for silo in silos]
        program.load(state.server, sites, [state.silos.get(silo, SiloState()) for silo in silos])
        for window in schedule.windows(self._window(program)):
            runner.run(window)
        program.settle(len(silos))
        results = self._results(program, silos, schedule.steps, state, context, trial=step_limit is not None)
        if mean is not None:
            mean.add(program.weights, sites, [result.update for result in results])
        seconds = time.perf_counter() - start
        return [self._handed_on(result, mean is not None, seconds / len(results)) for result in results]

    def _results(
        self,
        program: StackProgram,
        silos: Sequence[int],
        steps: Sequence[int],
        state: FederationState,
        context: RoundContext,
        *,
        trial: bool,
    ) -> list[Result]:
        """Every update passes the egress guard and the server's look at it; their tensors are views of the stack."""
        plan, federation = self._trainer.method.plan, self._trainer.federation
        finite = finite_rows([tensor[: len(silos)] for tensor in program.weights.values()]).tolist()
        results = []
        found = zip(silos, steps, program.terms(steps), program.kept(len(silos)), strict=True)
        for position, (silo, count, terms, kept) in enumerate(found):
            site = site_of(federation, silo)
            weights = {name: tensor[position] for name, tensor in program.weights.items()}
            parts = plan.split(weights, site)
            update = Update(
                silo=federation.silos[silo].name,
                round=context.round,
                blocks={key: part for key, part in parts.items() if plan.blocks[key.block].up},
                weights=self._trainer.weights(federation.silos[silo]),
                payloads={} if trial else self._trainer.payloads(silo, weights, context),
            )
            egress = pass_egress(update, plan, site, parts)
            if not finite[position] or update.payloads:
                check_update(update, state.server.blocks)
            results.append(Result(silo, update, egress, kept, terms, count, 0.0))
        return results

    @staticmethod
    def _handed_on(result: Result, merged: bool, seconds: float) -> Result:
        """The result without its views of the stack, which the next chunk overwrites."""
        blocks = {
            key: {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in part.items()}
            for key, part in ({} if merged else result.update.blocks).items()
        }
        return replace(result, update=replace(result.update, blocks=blocks), seconds=seconds)
