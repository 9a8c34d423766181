from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from engines.one_answer import config_of, trainer_of
from fedloom.engines import calibration
from fedloom.engines.base import FederationState, Job, SiloState
from fedloom.engines.calibration import fastest_reference, seconds_per_step
from fedloom.engines.reference import ReferenceEngine
from fedloom.errors import FedloomError
from fedloom.federation.rounds import RoundContext
from support import equal_bits, federation_of

THREE = federation_of([0] * 33, [1] * 7, [0, 1] * 10)  # 60 records: 20 a silo
OPEN = ("engine.workers=0", "engine.threads=0", "local.batch_size=5", "local.epochs=2")  # 8 steps a silo


class Clock:
    """Time that passes only where work is pretended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.trials = 0.0, 0
        monkeypatch.setattr(calibration.time, "perf_counter", lambda: self.now)

    def work(self, silos: int, start: float, step: float, longest: int) -> Callable[[int], int]:
        def trial(limit: int) -> int:
            steps, self.trials = min(limit, longest), self.trials + 1
            disturbed = 100.0 if self.trials % 2 else 0.0  # by others, every other time
            self.now += start + step * steps * silos + disturbed
            return steps * silos

        return trial


@pytest.mark.parametrize(
    ("silos", "start", "step", "longest", "expected"),
    [
        (1, 0.0, 2.0, 99, 2.0),
        (1, 4.0, 2.0, 99, 2.5),  # what a round costs beside its steps is shared by 8 of them
        (2, 8.0, 1.0, 99, 1.5),
        (1, 4.0, 2.0, 1, 6.0),  # a single step cannot be told from its start
    ],
)
def test_the_start_of_a_round_is_shared_by_its_steps(
    silos: int, start: float, step: float, longest: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trainer_of(config_of(*OPEN), THREE)
    assert seconds_per_step(Clock(monkeypatch).work(silos, start, step, longest), trainer) == pytest.approx(expected)


ALONE, THREADS, PROCESSES, BOTH = (1, 1, "process"), (2, 1, "thread"), (2, 1, "process"), (1, 2, "process")


@pytest.mark.parametrize(
    ("seconds", "left", "overrides", "chosen"),
    [
        ({ALONE: 1.0, THREADS: 0.9}, 0.0, (), ALONE),  # not by enough
        ({ALONE: 1.0, THREADS: 0.6}, 0.0, (), THREADS),
        ({ALONE: 1.0, THREADS: 0.6, PROCESSES: 0.5}, 1e9, (), PROCESSES),
        ({ALONE: 1.0, THREADS: 0.6, PROCESSES: None}, 1e9, (), THREADS),  # they cannot start
        ({ALONE: 1.0, BOTH: 0.5}, 1e9, ("engine.workers=1",), BOTH),
        ({ALONE: 1.0, BOTH: 0.5}, 1e9, ("participation.rate=0.3",), BOTH),  # one silo a round
        ({ALONE: 1.0, THREADS: 0.6}, 0.0, ("engine.threads=1",), THREADS),
        ({BOTH: 1.0}, 1e9, ("engine.threads=2",), BOTH),
    ],
)
def test_the_fastest_that_may_be_tried_is_taken(
    seconds: dict[tuple[int, int, str], float | None],
    left: float,
    overrides: tuple[str, ...],
    chosen: tuple[int, int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(engine: ReferenceEngine, *_: object) -> float:
        found = seconds.pop((engine.workers, engine.threads, engine.kind))
        if found is None:
            raise FedloomError("a worker process died")
        return found

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(calibration, "_reference_seconds", measured)
    monkeypatch.setattr(calibration, "steps_left", lambda *_: left)
    expected = seconds[chosen]
    engine, found = fastest_reference(*trainer_of(config_of(*OPEN, *overrides), THREE))
    assert (engine.workers, engine.threads, engine.kind) == chosen
    assert found == expected
    assert not seconds  # nothing else was tried, and nothing less
    engine.close()


def test_worker_threads_give_the_bits_of_the_plain_loop() -> None:
    """Private encoders, which draw fresh weights in the first round, and kept moments, over two rounds."""
    config = config_of("sharing.scopes.encoder=silo", "local.keep_optimizer=true")
    trainer, start = trainer_of(config, THREE)

    def after_two_rounds(engine: ReferenceEngine) -> FederationState:
        state = start
        for number in (1, 2):
            state, _ = engine.round(Job(state, RoundContext(number, 2, (0, 1, 2)), lambda _: None))
        engine.close()
        return state

    plain = after_two_rounds(ReferenceEngine(trainer))
    spread = after_two_rounds(ReferenceEngine(trainer, workers=2, kind="thread"))
    assert all(equal_bits(plain.server.blocks[key], spread.server.blocks[key]) for key in plain.server.blocks)
    nothing = SiloState()
    assert all(equal_bits(plain.silos[i].tensors, spread.silos.get(i, nothing).tensors) for i in (0, 1, 2))


def test_an_engine_sets_its_threads_again_when_another_was_tried() -> None:
    trainer, state = trainer_of(config_of(), THREE)
    engine = ReferenceEngine(trainer, threads=2)
    ReferenceEngine(trainer, threads=1)
    try:
        next(iter(engine.train(engine.tasks(state, RoundContext(1, 1, (1,))))))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
