"""Compiled steps over a fixed number of slots: what is learned stays the same, and the number is the cheapest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters

from engines.one_answer import (
    EVEN,
    METHODS,
    UNEQUAL,
    Played,
    assert_one_answer,
    config_of,
    pack_of,
    rounds_of,
    trainer_of,
)
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_program import StackProgram
from fedloom.engines.fused_runner import GraphRunner
from fedloom.engines.fused_slots import attendance, cheapest_slots, fillable, turns
from fedloom.engines.fused_stack import Member, Stack, stacks_of
from fedloom.errors import FedloomWarning

CPU, COMPILE = torch.device("cpu"), torch.compile
COMPILED = FusedOptions(CPU, compiled=True)
SOME = ("participation.rate=0.5", "rounds=6")


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every recording that is made, by a GPU's runner without a GPU; nothing is compiled, which takes a minute."""
    made: list[object] = []

    def record(warm_up: Callable[[], None], step: Callable[[], None], beside: object) -> Played:
        warm_up()
        made.append(step)
        return Played(step)

    def runner(engine: FusedEngine, program: StackProgram, stack: Stack) -> GraphRunner:
        return GraphRunner(program, "float32", 20, record, engine._filled(stack))

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(FusedEngine, "_runner", runner)
    return made


ATTENDED = ((0, 1, 2, 3, 4), (2,), (0, 1, 3), (4,), (1, 2, 3, 4))


@pytest.mark.parametrize("name", ["fedgan", "+D", "private encoder, kept moments", "sgd"])
def test_one_recording_serves_any_number_of_silos(name: str, recordings: list[object]) -> None:
    trainer, start = trainer_of(config_of(*METHODS[name], *SOME), EVEN)
    assert_one_answer(trainer, start, ATTENDED, COMPILED)
    assert len(recordings) == 1


def test_one_compilation_serves_all_rounds_and_any_number_of_silos(
    recordings: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two phases and the Adam of its parameters: four programs."""
    # Traces and guards as always, but generates no code.
    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    trainer, start = trainer_of(config_of(*METHODS["fedgan"], *SOME), EVEN)
    rounds_of(FusedEngine(trainer, COMPILED), start, ATTENDED[:3])
    assert counters["stats"]["unique_graphs"] == 4


def test_what_stands_at_empty_places_does_not_matter(recordings: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if it is no number."""
    load = StackProgram.load

    def spoilt(program: StackProgram, members: list[Member], states: list[object]) -> None:
        for tensor in program.weights.values():
            tensor.fill_(torch.nan)
        load(program, members, states)  # type: ignore[arg-type]

    monkeypatch.setattr(StackProgram, "load", spoilt)
    assert_one_answer(*trainer_of(config_of(*METHODS["fedgan"], *SOME), EVEN), ATTENDED, COMPILED)


def test_silos_that_end_before_others_have_recordings_of_their_own(recordings: list[object]) -> None:
    """At a slot that goes on, a silo would be trained longer than it should."""
    trainer, start = trainer_of(config_of(*METHODS["fedgan"]), UNEQUAL)
    (stack,) = stacks_of((trainer,), CPU)
    assert not fillable(stack)
    assert_one_answer(trainer, start, ((0, 1, 2, 3, 4), (1, 2)), COMPILED)
    assert len(recordings) == 3  # of five, three and two silos, which take one, two and three steps an epoch


def test_a_step_that_cannot_be_recorded_is_still_of_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any other number of silos it would be compiled once more."""

    def record(warm_up: Callable[[], None], step: Callable[[], None], beside: object) -> Played:
        raise RuntimeError("operation not permitted when stream is capturing")

    numbers: set[int] = set()
    step = StackProgram.step

    def counted(program: StackProgram, inputs: tuple[Tensor, ...]) -> None:
        numbers.add(len(inputs[0]))
        step(program, inputs)

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(StackProgram, "step", counted)
    monkeypatch.setattr(
        FusedEngine, "_runner", lambda engine, program, stack: GraphRunner(program, "float32", 20, record, filled=True)
    )
    with pytest.warns(FedloomWarning, match="going on with steps one by one"):
        assert_one_answer(*trainer_of(config_of(*METHODS["fedgan"], *SOME), EVEN), ATTENDED, COMPILED)
    assert len(numbers) == 1


def test_without_a_compiler_every_number_has_its_recording(recordings: list[object]) -> None:
    trainer, start = trainer_of(config_of(*METHODS["fedgan"], *SOME), EVEN)
    assert_one_answer(trainer, start, ATTENDED, replace(COMPILED, compiled=False))
    assert len(recordings) == 4  # of 1, 3, 4 and 5 silos


def test_attendance_is_that_of_the_rounds() -> None:
    runs = [(*METHODS["fedgan"], *SOME, f"seed={seed}") for seed in (0, 1)]
    _, members = pack_of(EVEN, *runs, options=COMPILED)
    trainers = [trainer for trainer, _ in members]
    (stack,) = stacks_of(trainers, CPU)
    found = attendance(stack)
    assert len(found) == 6
    for number, counts in enumerate(found, start=1):
        coins = [t.streams.uniform("participation", 5, round=number) < 0.5 for t in trainers]
        assert counts == [int(coin.sum()) for coin in coins]


@pytest.mark.parametrize(
    ("rounds", "most", "fixed", "slots"),
    [
        ([[20]] * 70, 128, 4, 20),
        ([[200]] * 70, 128, 4, 100),  # evenly: the second turn of 128 slots would be half empty
        ([[10, 10, 10]] * 70, 24, 4, 10),  # a run's silos stay together: three turns of 14 cost less than two of 24
        ([[10, 10, 10]] * 70, 24, 30, 20),  # but three of 40 more than two of 50
        ([[1]] * 99 + [[100]], 128, 4, 2),  # 149 turns of 6; with 1 slot 199 of 5, with 3 slots 133 of 7
        ([[8]] * 9 + [[12]], 128, 4, 8),  # 11 turns of 12 cost less than 10 of 16
        ([[1]] * 4 + [[2]], 128, 4, 2),  # 5 turns of 6 cost as much as 6 of 5
        ([[0], []], 128, 4, 1),
    ],
)
def test_the_number_of_places_is_the_cheapest(rounds: list[list[int]], most: int, fixed: int, slots: int) -> None:
    assert cheapest_slots(rounds, most, fixed) == slots


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6), st.integers(1, 12), st.integers(0, 30)
)
def test_no_other_number_costs_less(rounds: list[list[int]], most: int, fixed: int) -> None:
    def cost(slots: int) -> int:
        return sum(turns(counts, slots) * (slots + fixed) for counts in rounds)

    assert cost(cheapest_slots(rounds, most, fixed)) == min(map(cost, range(1, most + 1)))


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 12))
def test_turns_are_counted_as_they_are_taken(counts: list[int], slots: int) -> None:
    @dataclass(frozen=True)
    class Silo:
        run: int
        index: int

    left = [Silo(run, index) for run, count in enumerate(counts) for index in range(count)]
    taken_turns = 0
    while left:
        taken = FusedEngine._next_chunk(left, slots)  # type: ignore[arg-type]
        assert 0 < len(taken) <= slots
        left = [silo for silo in left if silo not in taken]
        taken_turns += 1
    assert taken_turns == turns(counts, slots)
