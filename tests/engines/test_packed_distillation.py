"""Distillations of a pack: those that compute the same function train in one stack, each as it would alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from engines.one_answer import (
    ALIGN,
    DISTIL,
    LARGER,
    METHODS,
    PRIVATE,
    UNEQUAL,
    Placed,
    Rounds,
    assert_same_rounds,
    lived_together,
    pack_of,
    rounds_of,
)
from fedloom.engines.base import Job
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_program import StackProgram
from fedloom.engines.fused_runner import GraphRunner
from fedloom.engines.fused_stack import Stack
from fedloom.engines.fused_support import UnsupportedError
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.distil import Distil
from fedloom.objectives.base import Losses

ALL_AT_ONCE = FusedOptions(torch.device("cpu"), chunk=15)
EVERYBODY = (0, 1, 2, 3, 4)
TWICE: Rounds = (EVERYBODY, EVERYBODY)


@pytest.fixture
def server_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many servers learned in each step that was taken."""
    taken: list[int] = []
    step = StackProgram.step

    def counted(program: StackProgram, inputs: tuple[Tensor, ...]) -> None:
        if program._phases[0].name == "server":
            taken.append(len(inputs[0]))
        step(program, inputs)

    monkeypatch.setattr(StackProgram, "step", counted)
    return taken


def assert_packed_equals_alone(
    federation: Federation, runs: list[tuple[str, ...]], attendance: list[Rounds], server_steps: list[int]
) -> list[int]:
    """Says how many servers learned in each step of the pack."""
    engine, members = pack_of(federation, *runs, options=ALL_AT_ONCE)
    together = lived_together(engine, [start for _, start in members], attendance)
    steps = list(server_steps)
    for (trainer, start), attended, ours in zip(members, attendance, together, strict=True):
        alone = rounds_of(FusedEngine(trainer, ALL_AT_ONCE), start, attended)
        assert_same_rounds(start, ours, alone, tolerance=1e-3)
    return steps


# The steps of each round: 40 samples of each of five silos, in batches of 16, make 13 in each of two epochs.
@pytest.mark.parametrize(
    ("name", "federation", "steps"),
    [
        ("align_fl", UNEQUAL, [26, 26]),
        ("align_fl of four architectures", UNEQUAL, [26]),
        ("ContrastAvgSynth", UNEQUAL, [26]),
        ("+D, then distilled", UNEQUAL, [2 * 5]),  # one average for each of two groups
        ("ContrastSynthOnly", UNEQUAL, [26]),
        ("private", LARGER, [26]),
        # 200 samples by size; then as many again of the decoders before.
        ("align_fl, replay by size, moments kept", UNEQUAL, [26, 50]),
    ],
)
def test_distillations_of_a_pack_train_in_one_stack(
    name: str, federation: Federation, steps: list[int], server_steps: list[int]
) -> None:
    overrides = {**METHODS, "private": (ALIGN, *DISTIL, *PRIVATE)}[name]
    runs = [(*overrides, f"seed={seed}") for seed in (1, 2, 3)]
    assert assert_packed_equals_alone(federation, runs, [(EVERYBODY,) * len(steps)] * 3, server_steps) == [3] * sum(
        steps
    )


def test_distillations_of_different_sizes(server_steps: list[int]) -> None:
    """First two runs have 5 and 3 decoders, 13 and 8 steps an epoch; then three have 5, 4 and 2: 13, 10 and 5."""
    attendance: list[Rounds] = [TWICE, ((0, 1, 2), (3,)), ((), (1, 2))]
    runs = [(ALIGN, *DISTIL, f"seed={seed}") for seed in (1, 2, 3)]
    steps = assert_packed_equals_alone(UNEQUAL, runs, attendance, server_steps)
    assert steps == [2] * 16 + [1] * 10 + [3] * 10 + [2] * 10 + [1] * 6


def test_distillations_that_compute_other_functions_have_stacks_of_their_own(server_steps: list[int]) -> None:
    runs = [(ALIGN, *DISTIL, "seed=1"), (ALIGN, *DISTIL, "seed=2", "server.model.hidden=[5]"), (ALIGN, *DISTIL)]
    steps = assert_packed_equals_alone(UNEQUAL, runs, [(EVERYBODY,)] * 3, server_steps)
    assert steps == [2] * 26 + [1] * 26


def test_recordings_of_distillations_outlast_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read records where those lay when they were made; a run without a distillation leaves them as they are."""
    recorded: list[str] = []

    def runner(engine: FusedEngine, program: StackProgram, stack: Stack) -> GraphRunner:
        def record(warm_up: Callable[[], None], step: Callable[[], None], beside: object) -> Placed:
            recorded.append(stack.kind.phases[0].name)
            return Placed(step, stack.table, stack.table.records)

        return GraphRunner(program, "float32", 26, record)

    monkeypatch.setattr(FusedEngine, "_runner", runner)
    engine, members = pack_of(UNEQUAL, *((ALIGN, *DISTIL, f"seed={seed}") for seed in (1, 2, 3)), options=ALL_AT_ONCE)
    attendance: list[Rounds] = [(*TWICE, EVERYBODY), (EVERYBODY, (), EVERYBODY), (EVERYBODY, EVERYBODY, (2,))]
    together = lived_together(engine, [start for _, start in members], attendance)
    assert recorded.count("server") == 2  # for three servers, and for two
    monkeypatch.undo()
    for (trainer, start), attended, ours in zip(members, attendance, together, strict=True):
        assert_same_rounds(start, ours, rounds_of(FusedEngine(trainer, ALL_AT_ONCE), start, attended), tolerance=1e-3)


@pytest.mark.filterwarnings("ignore:out of device memory")
def test_distillations_that_do_not_fit_together_are_taught_alone(
    server_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is memory for the 200 records of one distillation."""
    draw = StackProgram.draw

    def short_of_memory(program: StackProgram, silos: int) -> None:
        if program._phases[0].name == "server" and len(program._stack.table.records) > 200:
            raise torch.OutOfMemoryError("no room")
        draw(program, silos)

    monkeypatch.setattr(StackProgram, "draw", short_of_memory)
    runs = [(ALIGN, *DISTIL, f"seed={seed}") for seed in (1, 2)]
    steps = assert_packed_equals_alone(UNEQUAL, runs, [(EVERYBODY,)] * 2, server_steps)
    assert steps == [1] * 26 * 2


class Choosy(nn.Module):
    """Goes one of two ways by what it sees, which no batching survives."""

    def forward(self, x: Tensor) -> Tensor:
        """The same, or its negative."""
        return x if x.sum() > 0 else -x


@dataclass(frozen=True)
class BuildChoosy:
    """The server's model with a module that cannot be batched."""

    build: Callable[[Site], nn.Module]

    def __call__(self, site: Site) -> nn.Module:
        """Fresh weights."""
        model = self.build(site)
        model.encoder = nn.Sequential(Choosy(), model.encoder)
        return model


@dataclass(frozen=True)
class Late:
    """An objective that fails in the second round."""

    objective: object

    @property
    def noise(self):
        return self.objective.noise

    def __call__(self, model, step) -> Losses:
        if step.context.round == 2:
            raise ArithmeticError("a fault in the second round")
        return self.objective(model, step)


class Unprepared(Distil):
    """Has no distillation in the second round."""

    def distillation(self, server, context, streams, device):
        if context.round == 2:
            raise FedloomError("no decoder to be sampled")
        return super().distillation(server, context, streams, device)


def unprepared(step: Distil) -> Distil:
    return Unprepared(step.method, step.student, step.server_plan, step.settings)


def unsupported(step: Distil) -> Distil:
    return replace(step, student=replace(step.student, build=BuildChoosy(step.student.build)))


def failing(step: Distil) -> Distil:
    (phase,) = step.student.phases
    return replace(step, student=replace(step.student, phases=(replace(phase, objective=Late(phase.objective)),)))


@pytest.mark.parametrize(
    ("fault", "kind", "complaint", "round"),
    [
        (unprepared, FedloomError, "no decoder to be sampled", 2),
        (unsupported, UnsupportedError, "cannot be batched over silos", 1),
        (failing, ArithmeticError, "a fault in the second round", 2),
    ],
)
def test_what_goes_wrong_in_a_distillation_leaves_the_others_alone(
    fault: Callable[[Distil], Distil], kind: type[Exception], complaint: str, round: int
) -> None:
    _, members = pack_of(UNEQUAL, *((ALIGN, *DISTIL, f"seed={seed}") for seed in (1, 2, 3)), options=ALL_AT_ONCE)
    trainers, states = [trainer for trainer, _ in members], [start for _, start in members]
    trainers[1] = with_step(trainers[1], fault)
    engine = FusedEngine(trainers[0], ALL_AT_ONCE, packed=trainers[1:])
    for number in (1, 2):
        context = RoundContext(number, 9, EVERYBODY)
        going = [run for run in range(3) if run != 1 or number <= round]  # whoever fails leaves the pack
        outcomes = engine.rounds({run: Job(states[run], context, lambda _: None) for run in going})
        for run, outcome in outcomes.items():
            if (run, number) == (1, round):
                assert isinstance(outcome, kind)
                assert complaint in str(outcome)
                continue
            assert not isinstance(outcome, Exception)
            alone = FusedEngine(trainers[run], ALL_AT_ONCE).round(Job(states[run], context, lambda _: None))
            assert_same_rounds(states[run], (outcome[0], [outcome[1]], []), (*alone[:1], [alone[1]], []), 1e-3)
            states[run] = outcome[0]


def with_step(trainer: Trainer, change: Callable[[Distil], Distil]) -> Trainer:
    """A trainer whose server step is changed."""
    step = trainer.method.server_step
    assert isinstance(step, Distil)
    return replace(trainer, method=replace(trainer.method, server_step=change(step)))
