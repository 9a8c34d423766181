"""Batches in several passes: they change what is kept at once, and neither gradients nor losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from engines.one_answer import METHODS, ROUNDS, UNEQUAL, assert_same_rounds, config_of, rounds_of, trainer_of
from fedloom.engines.base import FederationState
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError
from fedloom.methods.base import Method
from fedloom.objectives.base import Losses, Objective, Step, slices_of

FLOW = METHODS["fission_flow"]


@dataclass(frozen=True)
class Counted:
    """An objective, and how many rows it has seen at once."""

    objective: Objective
    seen: list[int]

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        return self.objective.noise

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        self.seen.append(len(step.batch.mask))
        return self.objective(model, step)


def in_passes(trainer: Trainer, at_once: int) -> tuple[Trainer, list[int]]:
    (phase,), seen = trainer.method.phases, list[int]()
    phase = replace(phase, objective=Counted(phase.objective, seen), at_once=at_once)
    return replace(trainer, method=replace(trainer.method, phases=(phase,))), seen


@pytest.fixture(scope="module")
def flow() -> tuple[Trainer, FederationState]:
    return trainer_of(config_of(*FLOW), UNEQUAL)


@pytest.mark.parametrize(
    ("count", "at_once", "sizes"),
    [(32, 0, [32]), (32, 32, [32]), (32, 40, [32]), (32, 9, [8] * 4), (5, 3, [3, 2]), (3, 1, [1] * 3), (0, 2, [0])],
)
def test_parts_are_few_and_about_equal(count: int, at_once: int, sizes: list[int]) -> None:
    rows = list(range(count))
    parts = [rows[part] for part in slices_of(count, at_once)]
    assert [len(part) for part in parts] == sizes
    assert list(chain.from_iterable(parts)) == rows


@pytest.mark.parametrize("lanes", [0, 2])
def test_what_is_learned_is_that_of_whole_batches(flow: tuple[Trainer, FederationState], lanes: int) -> None:
    whole, start = flow
    parts, seen = in_passes(whole, 3)
    options = FusedOptions(torch.device("cpu"), chunk=3, lanes=lanes)
    engine = FusedEngine(parts, options) if lanes else ReferenceEngine(parts)
    seen.clear()
    ours = rounds_of(engine, start, ROUNDS)
    assert max(seen) == 3
    assert_same_rounds(start, ours, rounds_of(ReferenceEngine(whole), start, ROUNDS))


def method_with(*overrides: str) -> Method:
    return trainer_of(config_of(*FLOW, *overrides), UNEQUAL)[0].method


def at_once_with(*overrides: str) -> int:
    (phase,) = method_with(*overrides).phases
    return phase.at_once


def test_passes_follow_from_the_configuration_alone() -> None:
    """One size of 8 channels, 9 x 8 pixels: 20 x 576 numbers of blocks, 8 x 576 of the middle, 3 x (72^2 + 6 x 576)."""
    bytes_of_one = 4 * (28 * 576 + 3 * (72**2 + 6 * 576))
    for rows in (1, 5):
        megabytes = (rows + 0.5) * bytes_of_one / 2**20
        assert at_once_with(f"engine.pass_memory={megabytes}") == rows
        assert at_once_with(f"engine.pass_memory={3 * megabytes}", "method.draws=3") == rows
    assert at_once_with("engine.pass_memory=0.001") == 1
    assert at_once_with() > 1000


def test_too_little_memory_is_one_sentence(
    flow: tuple[Trainer, FederationState], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Tensor:
        return torch.empty(2**60)  # what torch says of it is its own

    trainer, start = flow
    monkeypatch.setattr(type(trainer.method.phases[0].objective), "__call__", full)
    with pytest.raises(FedloomError, match=r"does not fit into this machine's memory: .*engine\.pass_memory"):
        rounds_of(ReferenceEngine(trainer), start, ((0,),))
