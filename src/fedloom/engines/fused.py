"""The fused engine: all silos of a round in one batched program; what is learned equals the reference engine's.

Several runs may share an engine: silos that compute the same function train in one stack, whichever run they are of.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedloom.engines.base import FederationState, Job, Outcome, Result, RoundReport
from fedloom.engines.distributed import takes_step_with_sum
from fedloom.engines.fused_distillation import DistillationPool
from fedloom.engines.fused_layers import rewritten
from fedloom.engines.fused_private import PrivateProgram, probed
from fedloom.engines.fused_program import StackProgram
from fedloom.engines.fused_records import ChunkTable, refill
from fedloom.engines.fused_results import RunRound, Slot, Trained
from fedloom.engines.fused_runner import GraphRecorder, GraphRunner, PlainRunner, Runner
from fedloom.engines.fused_slots import FIXED, attendance, cheapest_slots, fillable
from fedloom.engines.fused_stack import Member, Stack, stacks_of
from fedloom.engines.fused_step import Precision
from fedloom.engines.fused_support import UnsupportedError, finite_rows, tried
from fedloom.engines.pieces import RoundPart, RoundPiece
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError, FedloomWarning
from fedloom.federation.records import Records

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
    lanes: int = 0  # in which silos take their steps one by one; 0: all of a stack at once
    host_noise: bool = False  # under DP-SGD draw noise as the reference engine does, also for a GPU, which is slow


class FusedEngine:
    """Stacks of silos, chunk after chunk."""

    def __init__(
        self,
        trainer: Trainer,
        options: FusedOptions,
        stacks: Sequence[Stack] | None = None,
        packed: Sequence[Trainer] = (),
    ) -> None:
        """``packed`` are the trainers of further runs; ``stacks`` those of all runs, where they are made already."""
        self._trainers, self.options = (trainer, *packed), options
        for trainer in self._trainers:
            if trainer.config.privacy.pretraining:
                raise UnsupportedError("privacy.pretraining is not built into the fused engine")
            if not trainer.method.phases:
                raise UnsupportedError(f"method '{trainer.method.name}' trains nothing at the silos")
            if takes_step_with_sum(trainer.method, trainer.privacy):
                raise UnsupportedError("the fused engine shares no noise of groups, or beside payloads")
        self.chunk = options.chunk
        self._stacks = stacks_of(self._trainers, options.device) if stacks is None else stacks
        # Before layers are rewritten: what is put in their place has no rules for the gradients of examples.
        self._probes = [
            [probed(stack, phase) for phase in stack.kind.phases] if stack.kind.privacy else []
            for stack in self._stacks
        ]
        self._convolutions = [self._made_ready(stack) for stack in self._stacks]
        self._trials = [tried(stack, options.lanes > 0) for stack in self._stacks]
        everyone = sorted((m for stack in self._stacks for m in stack.members), key=lambda member: member.index)
        self._members = [[m for m in everyone if m.run == run] for run in range(len(self._trainers))]
        self._programs: dict[int, tuple[StackProgram, Runner]] = {}
        self._attended: dict[int, list[list[int]]] = {}  # of stacks: how many take part in each round
        self._sizes: dict[int, int] = {}  # of stacks: how many slots they have
        self._distillation_pool = DistillationPool([trainer.config for trainer in self._trainers], self.learning)
        if options.device.type == "cpu":
            torch.set_num_threads(1)

    def learning(self, trainers: Sequence[Trainer]) -> FusedEngine:
        """An engine for what servers learn, which is done too soon to be compiled."""
        return FusedEngine(trainers[0], replace(self.options, compiled=False), packed=trainers[1:])

    def _made_ready(self, stack: Stack) -> int:
        """The layers of a stack's model in the form in which they are called; how many convolutions were changed."""
        if not self.options.lanes:
            return rewritten(stack.model, self.options.matrix_convolutions)
        if stack.kind.privacy:
            raise UnsupportedError("DP-SGD does not train in lanes")
        return 0

    def describe(self) -> str:
        """Device, precision, and how the silos are batched."""
        device = self.options.device
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        stacks = f"{len(self._stacks)} stack" + ("" if len(self._stacks) == 1 else "s")
        sizes = (self._slots(number, stack) for number, stack in enumerate(self._stacks))
        most = max(sizes) if self.options.compiled else self.chunk
        parts = [f"fused on {where}", self.options.precision, f"{stacks} of up to {most} silos"]
        if len(self._trainers) > 1:
            parts.append(f"{len(self._trainers)} runs packed")
        if self.options.lanes:
            parts.append(f"in {self.options.lanes} lanes")
        if any(self._convolutions):
            parts.append("convolutions " + ("as matrix products" if self.options.matrix_convolutions else "in groups"))
        if self.options.compiled:
            parts.append("compiled")
        if any(isinstance(stack.table, ChunkTable) for stack in self._stacks):
            parts.append("records sent to the device as silos take part")
        return ", ".join(parts)

    def choice(self) -> dict[str, Any]:
        """How the silos are batched may change the last bit."""
        options = self.options
        return {
            "name": "fused",
            "device": options.device.type,
            "chunk": self.chunk,
            "matrix_convolutions": options.matrix_convolutions,
            "compiled": options.compiled,
            "lanes": options.lanes,
            **({"precision": options.precision} if options.device.type == "cuda" else {}),
            **gpu_of(options.device),
        }

    def round(self, job: Job) -> tuple[FederationState, RoundReport]:
        """Steps 2 to 6 of a round's life; the mean is taken on the device, chunk by chunk."""
        outcome = self.rounds({0: job})[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def pieces(self, job: Job) -> list[RoundPiece]:
        """The chunks of silos that train together."""
        return [
            RoundPiece(tuple(m.index for m in chunk), sum(m.steps for m in chunk)) for _, chunk in self._chunks(job)
        ]

    def carry_out(self, job: Job, pieces: Sequence[int]) -> list[RoundPart]:
        """Train chunks, whose sums are formed on the device."""
        chunks, parts, under_way = self._chunks(job), list[RoundPart](), RunRound(self._members[0], job)
        for piece in pieces:
            under_way.parts, (number, chunk) = [], chunks[piece]
            try:
                self._train_chunk(number, self._stacks[number], chunk, {0: under_way})
            except torch.OutOfMemoryError as error:
                raise FedloomError(
                    f"{len(chunk)} silos at once do not fit into a rank's device: begin the run on one rank, which "
                    "finds how many do, and resume it on more"
                ) from error
            if under_way.error is not None:
                raise under_way.error
            parts += [replace(part, piece=piece) for part in under_way.parts]
        return parts

    def concluded(self, job: Job, parts: Sequence[RoundPart]) -> tuple[FederationState, RoundReport]:
        """The server's half of a round, on sums of chunks that are added in their order."""
        under_way = RunRound(self._members[0], job)
        under_way.put_together(parts)
        outcome = self._concluded({0: under_way})[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _chunks(self, job: Job) -> list[tuple[int, list[Member]]]:
        """Those of the only run, each with the number of its stack."""
        found, chosen = [], set(job.context.participants)
        for number, stack in enumerate(self._stacks):
            left = in_order(member for member in stack.members if member.index in chosen)
            size = self._slots(number, stack)
            found += [(number, left[start : start + size]) for start in range(0, len(left), size)]
        return found

    def rounds(self, jobs: Mapping[int, Job]) -> dict[int, Outcome]:
        """The same round of several runs; what goes wrong in one of them is its outcome and leaves the others alone."""
        runs = {run: RunRound(self._members[run], job) for run, job in jobs.items()}
        self._train(runs)
        return self._concluded(runs)

    def _concluded(self, runs: Mapping[int, RunRound]) -> dict[int, Outcome]:
        """The server's half of the rounds."""
        for under_way in runs.values():
            under_way.step(self.options.device)
        distillations = {
            run: under_way.distillation for run, under_way in runs.items() if under_way.distillation is not None
        }
        distilled = self._distillation_pool.distil(distillations) if distillations else {}
        return {run: under_way.concluded(distilled.get(run)) for run, under_way in runs.items()}

    def train_together(self, jobs: Mapping[int, Job]) -> dict[int, list[Result] | Exception]:
        """The silos' half of a round of several runs, with nothing beside their blocks."""
        runs = {run: RunRound(self._members[run], job, trial=True) for run, job in jobs.items()}
        self._train(runs)
        return {run: under_way.error or under_way.results for run, under_way in runs.items()}

    def refilled(self, records: Mapping[int, Records]) -> bool:
        """Put other records in the place of those of runs with a single silo, if they fit: recordings stay valid."""
        members = [(stack, member) for stack in self._stacks for member in stack.members if member.run in records]
        return all(refill(stack.table, member.silo, records[member.run]) for stack, member in members)

    def close(self) -> None:
        """Give the device's memory back."""
        self._programs.clear()
        self._sizes.clear()
        for stack in self._stacks:
            stack.table.reserve(0)
        self._distillation_pool.close()
        if self.options.device.type == "cuda":
            torch.cuda.empty_cache()

    def _train(self, runs: Mapping[int, RunRound]) -> None:
        chosen = {run: set(under_way.job.context.participants) for run, under_way in runs.items()}
        for number, stack in enumerate(self._stacks):
            left = in_order(member for member in stack.members if member.index in chosen.get(member.run, ()))
            while left := [member for member in left if runs[member.run].error is None]:
                chunk = self._next_chunk(left, self._slots(number, stack))
                try:
                    self._train_chunk(number, stack, chunk, runs)
                except torch.OutOfMemoryError as error:
                    self._halve(number, error)
                    continue
                done = set(chunk)
                left = [member for member in left if member not in done]

    @staticmethod
    def _next_chunk(left: Sequence[Member], slots: int) -> list[Member]:
        """As many runs as fit, each with the silos that would train together if it were alone.

        So the last bit of what a run computes does not depend on who is packed with it.
        """
        chosen: set[Member] = set()
        for run in dict.fromkeys(member.run for member in left):
            own = [member for member in left if member.run == run][:slots]
            if len(chosen) + len(own) <= slots:
                chosen.update(own)
        return [member for member in left if member in chosen]

    def _halve(self, number: int, error: Exception) -> None:
        """Fewer silos at once, and nothing of other stacks beside the one that did not fit."""
        if self.chunk == 1 and self._programs.keys() <= {number}:
            raise FedloomError("a single silo's training does not fit into the device's memory") from error
        most = max(self._slots(each, stack) for each, stack in enumerate(self._stacks))
        self.chunk = max(1, most // 2)
        self.close()
        warnings.warn(f"out of device memory: going on with {self.chunk} silos at once", FedloomWarning, stacklevel=2)

    def _program(self, number: int, stack: Stack) -> tuple[StackProgram, Runner]:
        """A stack's memory and its runner, made when they are first needed."""
        if number not in self._programs:
            options = self.options
            size = self._slots(number, stack)
            common = stack, size, self._trials[number], options.precision, options.compiled
            if stack.kind.privacy:
                program: StackProgram = PrivateProgram(*common, self._probes[number], options.host_noise)
            else:
                program = StackProgram(*common, options.lanes)
            self._programs[number] = program, self._runner(program, stack)
        return self._programs[number]

    def _runner(self, program: StackProgram, stack: Stack) -> Runner:
        precision, device = self.options.precision, self.options.device
        if device.type == "cpu":
            return PlainRunner(program, precision)
        steps = min(self._window(program), max(member.steps for member in stack.members))
        return GraphRunner(program, precision, steps, GraphRecorder(device), self._filled(stack))

    def _filled(self, stack: Stack) -> bool:
        """Whether each step works on all slots, however many silos are there, so that one compilation does."""
        return self.options.compiled and not self.options.lanes and fillable(stack)

    def _slots(self, number: int, stack: Stack) -> int:
        """How many silos of a stack train at once, at most."""
        if number not in self._sizes:
            most = min(self.chunk, len(stack.members))
            self._sizes[number] = self._cheapest(number, stack, most) if self._filled(stack) else most
        return self._sizes[number]

    def _cheapest(self, number: int, stack: Stack, most: int) -> int:
        if number not in self._attended:
            self._attended[number] = attendance(stack)
        return cheapest_slots(self._attended[number], most, FIXED[self._convolutions[number] > 0])

    def _window(self, program: StackProgram) -> int:
        """How many steps' worth of batches and noise are drawn at once."""
        return max(1, WINDOW_NUMBERS[self.options.device.type] // (program.size * program.numbers_per_step))

    def _train_chunk(
        self,
        number: int,
        stack: Stack,
        members: Sequence[Member],
        runs: Mapping[int, RunRound],
    ) -> None:
        start = time.perf_counter()
        program, runner = self._program(number, stack)
        context = runs[members[0].run].job.context  # what an objective may see of it is the same in all of them
        program.begin(context, [runs[member.run].secret(member.index) for member in members if member.trainer.privacy])
        schedule = program.schedule(members)
        runner.prepare(schedule.counts(), context.round)
        program.load(members, [runs[member.run].job.state for member in members])
        for window in schedule.windows(self._window(program)):
            runner.run(window)
        slots: dict[int, list[Slot]] = {}
        for position, (member, steps) in enumerate(zip(members, schedule.steps, strict=True)):
            if runs[member.run].error is None:
                slots.setdefault(member.run, []).append(Slot(member, position, steps))
        if not slots:
            return
        codes = program.settle(len(members))
        # Bookkeeping and the orders to merge, while the device still works through its steps; then only is it waited
        # for. And only then is anything taken: a chunk that does not fit into memory leaves no half of itself behind.
        parts = [(runs[run], runs[run].gathered(found, program.weights, codes)) for run, found in slots.items()]
        trained = self._left_at_places(program, schedule.steps)
        seconds = (time.perf_counter() - start) / len(members)
        for run, part in parts:
            run.take(part, trained, seconds)

    @staticmethod
    def _left_at_places(program: StackProgram, steps: Sequence[int]) -> list[Trained]:
        """What training left at each slot."""
        count = len(steps)
        finite = finite_rows([tensor[:count] for tensor in program.weights.values()])
        found = zip(program.terms(steps), program.kept(count), finite.tolist(), strict=True)
        return [Trained(terms, kept, is_finite) for terms, kept, is_finite in found]


def gpu_of(device: torch.device) -> dict[str, str]:
    """The model of a GPU: another one gives other last bits, and other noise."""
    return {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}


def in_order(members: Iterable[Member]) -> list[Member]:
    """Those with most steps first, so that silos that train together end together."""
    return sorted(members, key=lambda member: (-member.steps, member.run, member.index))
