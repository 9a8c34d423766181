"""The noise that leaves a silo is the noise that its ledger was charged for, on every path that there is.

Divided by the standard deviation that was charged for, what a silo sends must be standard normal numbers that have
nothing to do with one another. Each check fails by chance less than once in 10^10 times, with whatever randomness, so
that no seed is needed; a width that is off by 2 % is seen all but always, as 18 standard errors of 420,000 numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chi2, kstest, norm
from torch import Tensor

from engines.pure_noise import (
    CPU,
    INPUTS,
    MANY,
    NUMBERS,
    ROUNDS,
    SILOS,
    STILL,
    TOLERATED,
    Sent,
    as_on_a_gpu,
    batched,
    deployed,
    late,
    plain,
    pretrained,
    searched,
    side_by_side,
    sums,
    together,
)
from fedloom.engines import training
from fedloom.engines.base import Task
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_private import PrivateProgram
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import PRETRAINING_ROUND, Trainer
from fedloom.methods.base import METHODS
from fedloom.privacy.dp_sgd import DPSGD
from fedloom.privacy.noise import NoiseKey, Randomness
from fedloom.privacy.payload_sums import SumNoise
from fedloom.privacy.trust import Distributed
from fedloom.sharing.plan import Tensors

IMPROBABLE = 1e-10


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method of this name, for everybody who makes one from a configuration."""
    monkeypatch.setitem(METHODS.own, "still", STILL)


# What is wrong with it


def strange(statistic: float) -> bool:
    """Whether a standard normal number would hardly ever be as far from 0."""
    return bool(2 * norm.sf(abs(statistic)) < IMPROBABLE)


def has_another_width(numbers: Tensor) -> bool:
    """By a chi-square test."""
    total, count = float(numbers.square().sum()), len(numbers)
    return bool(min(chi2.cdf(total, count), chi2.sf(total, count)) < IMPROBABLE)


def has_another_shape(numbers: Tensor) -> bool:
    """Not around 0, of heavier or lighter tails, or of another distribution altogether; whatever its width."""
    unit, count = of_unit_width(numbers), len(numbers)
    tails = (float(unit.pow(4).mean()) - 3) * math.sqrt(count / 24)
    return strange(float(unit.mean()) * math.sqrt(count)) or strange(tails) or kstest(unit, "norm").pvalue < IMPROBABLE


def echoes(one: Tensor, other: Tensor) -> bool:
    """Whether some of the numbers of one come back in the other, at whatever shift."""
    ours, theirs = (torch.fft.rfft(of_unit_width(numbers)) for numbers in (one, other))
    heard = torch.fft.irfft(ours * theirs.conj(), n=len(one)) / math.sqrt(len(one))
    loudest = heard[1:] if one is other else heard
    return bool(2 * len(heard) * norm.sf(float(loudest.abs().max())) < IMPROBABLE)


def of_unit_width(numbers: Tensor) -> Tensor:
    return numbers / numbers.square().mean().sqrt()


def problems(sent: Mapping[Any, Tensor]) -> set[str]:
    """What would not be so if these were independent standard normal numbers."""
    found = {"width" for numbers in (*sent.values(), torch.cat([*sent.values()])) if has_another_width(numbers)}
    found |= {"shape" for numbers in sent.values() if has_another_shape(numbers)}
    pairs = itertools.combinations_with_replacement(sent.values(), 2)
    return found | {"echo" for one, other in pairs if echoes(one, other)}


PATHS: dict[str, Callable[[Path], Sent]] = {
    "reference": plain,
    "written out": lambda folder: plain(folder, "method.behind=true", "rounds=1"),
    "late": late,
    "pretraining": pretrained,
    "fused": batched,
    "fused, written out": lambda folder: batched(folder, "method.behind=true", "rounds=1"),
    "fused, as on a GPU": as_on_a_gpu,
    "packed": side_by_side,
    "payloads": sums,
    "deployed": deployed,
    "deployed payloads": lambda folder: deployed(folder, "method.phases=0", "method.payloads=2"),
}


@pytest.mark.parametrize("path", PATHS)
def test_noise_is_what_the_ledger_was_charged_for(path: str, tmp_path: Path) -> None:
    sent = PATHS[path](tmp_path)
    assert len(sent) >= 4
    assert {len(numbers) for numbers in sent.values()} == {NUMBERS}
    assert problems(sent) == set()


# Faults: half and a tenth of the noise, in the one place where each path takes its width from

Weaken = Callable[[pytest.MonkeyPatch, float], None]


def of_the_mechanism(patch: pytest.MonkeyPatch, factor: float) -> None:
    honest = DPSGD.gradient_noise.fget
    patch.setattr(DPSGD, "gradient_noise", property(lambda mechanism: factor * honest(mechanism)))


def of_the_pretraining(patch: pytest.MonkeyPatch, factor: float) -> None:
    steps = Trainer._steps

    def weak(trainer: Trainer, task: Task, *rest: Any) -> Any:
        if task.context.round == PRETRAINING_ROUND:
            weaker = replace(task.mechanism, noise_multiplier=factor * task.mechanism.noise_multiplier)
            task = replace(task, mechanism=weaker)
        return steps(trainer, task, *rest)

    patch.setattr(Trainer, "_steps", weak)


def of_places(places: slice) -> Weaken:
    """Of those silos of a stack."""

    def weaken(patch: pytest.MonkeyPatch, factor: float) -> None:
        load = PrivateProgram.load

        def weak(program: PrivateProgram, *arguments: Any) -> None:
            load(program, *arguments)
            program._scales[1, places] *= factor

        patch.setattr(PrivateProgram, "load", weak)

    return weaken


def of_the_payloads(patch: pytest.MonkeyPatch, factor: float) -> None:
    patch.setattr(training, "SumNoise", lambda multiplier, *rest: SumNoise(factor * multiplier, *rest))


WEAK: dict[str, Weaken] = {
    "reference": of_the_mechanism,
    "written out": of_the_mechanism,
    "late": of_the_mechanism,
    "pretraining": of_the_pretraining,
    "fused": of_places(slice(None)),
    "fused, written out": of_places(slice(None)),
    "fused, as on a GPU": of_places(slice(1, 2)),
    "packed": of_places(slice(3, 4)),  # a single silo of the second run
    "payloads": of_the_payloads,
    "deployed": of_the_mechanism,
    "deployed payloads": of_the_payloads,
}


@pytest.mark.parametrize("factor", [0.5, 0.1])
@pytest.mark.parametrize("path", PATHS)
def test_half_the_noise_and_a_tenth_are_found_out(
    path: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WEAK[path](monkeypatch, factor)
    assert "width" in problems(PATHS[path](tmp_path))


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_noise_that_is_off_by_2_percent_is_found_out(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_the_mechanism(monkeypatch, factor)
    assert problems(plain(tmp_path)) == {"width"}


def test_noise_of_the_last_round_in_every_round_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Charged round by round, as it was planned."""
    tasks = ReferenceEngine.tasks

    def of_the_last(engine: ReferenceEngine, *arguments: Any) -> list[Task]:
        plans = engine._trainer.privacy
        return [replace(task, mechanism=plans[task.silo].mechanism(ROUNDS)) for task in tasks(engine, *arguments)]

    monkeypatch.setattr(ReferenceEngine, "tasks", of_the_last)
    assert problems(late(tmp_path)) == {"width"}


# Faults: noise that is used more than once


class Remembering:
    """Draws once for all moments that look the same, whatever the source."""

    def __init__(self, looks: Callable[[NoiseKey], Any]) -> None:
        self._looks, self._known = looks, dict[Any, Tensor]()

    def of(self, source: Randomness) -> Any:
        def normal(count: int, noise_key: NoiseKey, device: torch.device | str = "cpu") -> Tensor:
            return self._known.setdefault(self._looks(noise_key), source.normal(count, noise_key, device))

        return SimpleNamespace(normal=normal)


SHARED: dict[str, tuple[Callable[[NoiseKey], Any], str]] = {
    "steps": (
        lambda noise_key: (noise_key.silo, noise_key.round, noise_key.step % 2),
        "width",
    ),  # two phases take turns
    "phases": (lambda noise_key: (noise_key.silo, noise_key.round, noise_key.step // 2), "echo"),
    "silos": (lambda noise_key: (noise_key.round, noise_key.step), "echo"),
    "rounds": (lambda noise_key: (noise_key.silo, noise_key.step), "echo"),
}


@pytest.mark.parametrize("shared", SHARED)
def test_noise_that_is_used_twice_is_found_out(shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, problem = SHARED[shared]
    draw, remembering = DPSGD.draw, Remembering(looks)

    def again(
        mechanism: DPSGD, parameters: Mapping[str, Tensor], randomness: Randomness, noise_key: NoiseKey
    ) -> Tensors:
        return draw(mechanism, parameters, remembering.of(randomness), noise_key)

    monkeypatch.setattr(DPSGD, "draw", again)
    assert problems(plain(tmp_path)) == {problem}


def test_payloads_that_share_noise_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remembering = Remembering(lambda noise_key: (noise_key.silo, noise_key.round, noise_key.step))
    monkeypatch.setattr(training, "SumNoise", lambda a, b, source, *more: SumNoise(a, b, remembering.of(source), *more))
    assert problems(sums(tmp_path)) == {"echo"}


@pytest.mark.parametrize(
    ("fault", "problem"),
    [(lambda rooms: rooms[1].copy_(rooms[0]), "echo"), (lambda rooms: rooms[0].copy_(rooms[0].roll(999, 1)), None)],
    ids=["phases", "no fault: another order"],
)
def test_phases_of_a_stack_that_share_noise_are_found_out(
    fault: Callable[[list[Tensor]], Any], problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = PrivateProgram.draw

    def faulty(program: PrivateProgram, silos: int) -> None:
        draw(program, silos)
        fault([room.flat for room in program._rooms.values()])

    monkeypatch.setattr(PrivateProgram, "draw", faulty)
    assert problems(batched(tmp_path)) == ({problem} if problem else set())


def test_a_stack_that_draws_once_in_a_round_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, drawn = PrivateProgram.draw, set[int]()

    def once(program: PrivateProgram, silos: int) -> None:
        if id(program._source) not in drawn:
            draw(program, silos)
        drawn.add(id(program._source))

    monkeypatch.setattr(PrivateProgram, "draw", once)
    assert "width" in problems(batched(tmp_path))


def test_a_stretch_of_noise_that_comes_back_is_found_out() -> None:
    """5,000 numbers of another release, at another place."""
    one, other = torch.randn(2, NUMBERS, dtype=torch.float64)
    assert problems({1: one, 2: other}) == set()
    other[70_000:75_000] = one[:5000]
    assert problems({1: one, 2: other}) == {"echo"}


def test_noise_of_another_shape_is_found_out() -> None:
    """Of the right width: even numbers, and normal ones cut off at three deviations."""
    even = math.sqrt(3) * (2 * torch.rand(NUMBERS, dtype=torch.float64) - 1)
    cut = torch.randn(NUMBERS, dtype=torch.float64).clamp(-2.5, 2.5)
    assert problems({"even": even}) == {"shape"}
    assert problems({"cut off": cut / cut.square().mean().sqrt()}) == {"shape"}


# Noise of which each adds a part


@pytest.mark.parametrize("what", ["method.phases=1", "method.phases=0"], ids=["a step", "payloads"])
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.1])
def test_silos_share_the_noise_and_those_that_can_be_counted_on_add_up_to_all_of_it(
    what: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one that drops out, and without the noise of one that looks on."""
    share, enough = Distributed.share.fget, SILOS - 1 - TOLERATED
    monkeypatch.setattr(Distributed, "share", property(lambda trust: factor * share(trust)))
    sent = together(tmp_path, what, "method.payloads=" + ("1" if what == "method.phases=0" else "0"))
    assert len(sent) == SILOS * ROUNDS
    parts = {key: numbers * math.sqrt(enough) for key, numbers in sent.items()}
    rounds = [[numbers for (_, number, _), numbers in sent.items() if number == wanted] for wanted in (1, 2)]
    totals = {(i, place): sum(own[place : place + enough]) for i, own in enumerate(rounds) for place in (0, enough)}
    wanted = set() if factor == 1.0 else {"width"}
    assert problems(parts) == problems(totals) == wanted


def all_at_once(trainer: Trainer) -> FusedEngine:
    return FusedEngine(trainer, FusedOptions(CPU, chunk=len(MANY)))


@pytest.mark.parametrize("engine_of", [ReferenceEngine, all_at_once], ids=["reference", "fused"])
@pytest.mark.parametrize(("weak", "factor"), [("", 1.0), ("gradient_noise", 0.5), ("count_noise", 0.5)])
def test_a_bound_that_is_searched_for_costs_sums_and_counts_their_parts(
    engine_of: Callable[[Trainer], ReferenceEngine | FusedEngine],
    weak: str,
    factor: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if weak:
        honest = getattr(DPSGD, weak).fget
        monkeypatch.setattr(DPSGD, weak, property(lambda mechanism: factor * honest(mechanism)))
    rows, counts = searched(engine_of)
    assert rows.shape == (2 * len(MANY), 30 * (INPUTS + 1))
    assert has_another_width(rows.flatten()) == (weak == "gradient_noise")
    assert has_another_width(counts) == (weak == "count_noise")
    if not weak:
        assert kstest(counts, "norm").pvalue > IMPROBABLE
        assert not any(echoes(counts, column) for column in rows.t())
