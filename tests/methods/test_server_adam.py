"""An Adam at the server: its numbers, who it moves, and that a sum is all that it needs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from fedloom.config import load_config
from fedloom.engines.base import initial_state
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment, resume, train
from fedloom.federation.rounds import RoundContext
from fedloom.methods.server_adam import ServerAdam
from fedloom.methods.steps import Merged, ServerState
from fedloom.sharing.plan import GLOBAL, BlockKey, SharingPlan, Tensors
from fedloom.sharing.update import Update
from fedloom.streams import Streams
from support import assert_same_run, round_of, tiny_config

A, B = BlockKey("a", "all"), BlockKey("b", "all")
PLAN = SharingPlan({"a": GLOBAL, "b": GLOBAL}, ("g",))
STEP = ServerAdam(Merged(), learning_rate=0.5)


def after(state: ServerState, blocks: dict[BlockKey, Tensors], number: int) -> ServerState:
    update = Update("s", number, blocks, {"all": 1.0})
    return STEP(round_of(state, [update], RoundContext(number, 9, (0,)), Streams(0), PLAN)).state


def numbers(*values: float) -> Tensors:
    return {"w": torch.tensor(values)}


def test_it_moves_as_adam_does_whose_gradients_are_how_far_averages_lie() -> None:
    start = numbers(1.0, -2.0, 0.0)["w"]
    gradients = [torch.tensor(g) for g in ([0.3, -1e-4, 0.0], [-0.1, -1e-4, 2.0], [0.2, 5.0, -2.0])]
    weights = torch.nn.Parameter(start.clone())
    reference = torch.optim.Adam([weights], lr=0.5, betas=(0.9, 0.99))
    state = ServerState({A: {"w": start}})
    for number, gradient in enumerate(gradients, 1):
        state = after(state, {A: {"w": state.blocks[A]["w"] - gradient}}, number)
        weights.grad = gradient
        reference.step()
    torch.testing.assert_close(state.blocks[A]["w"], weights.data, rtol=1e-3, atol=1e-5)


def test_a_copy_that_nobody_took_part_for_stays_and_counts_its_own_rounds() -> None:
    state = ServerState({A: numbers(1.0), B: numbers(1.0)})
    state = after(state, {A: numbers(0.9)}, 1)
    assert state.blocks[B]["w"].item() == 1.0
    state = after(state, {A: numbers(0.0), B: numbers(0.2)}, 2)
    assert state.blocks[B]["w"].item() == pytest.approx(0.5)  # its first step is of the learning rate's length
    assert {name: int(tensor) for name, tensor in state.memory.items() if name.endswith("/rounds")} == {
        "adam/a@all/rounds": 2,
        "adam/b@all/rounds": 1,
    }


def test_a_counter_is_taken_as_it_came() -> None:
    state = ServerState({A: {"w": torch.tensor(1.0), "seen": torch.tensor(3)}})
    found = after(state, {A: {"w": torch.tensor(0.5), "seen": torch.tensor(8)}}, 1)
    assert found.blocks[A] == {"w": torch.tensor(0.5), "seen": torch.tensor(8)}


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    config = tiny_config("method.name=fissionvae", "server.step=adam", "engine.keep_checkpoints=2")
    whole = train(config, tmp_path / "whole").folder.path
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "round-0002")
    (stopped / "status.json").unlink()
    resume(stopped)
    assert_same_run(stopped, whole)


def test_the_rate_of_a_single_step_at_silos_cancels(tmp_path: Path) -> None:
    """Under shared noise silos must take one step of SGD; Adam then moves as far whatever their rate."""
    settings = ("method.name=fedvae", "rounds=1", "local.steps=1", "local.optimizer=sgd", "server.step=adam")
    one, other = (
        train(tiny_config(*settings, f"local.learning_rate={rate}"), tmp_path / str(rate)).generator().server.blocks
        for rate in (1.0, 0.25)
    )
    for key, block in one.items():
        for name, tensor in block.items():
            moved = (tensor - other[key][name]).abs()
            assert moved.max() < 2e-3  # where a gradient is lost in rounding its sign may be another
            assert moved.mean() < 2e-6, (key, name)


def test_it_needs_the_noisy_sum_alone(tmp_path: Path) -> None:
    """Noise is in every gradient, so the first step moves every weight, and each by the learning rate."""
    settings = (
        "method.name=fedvae",
        "rounds=1",
        "local.steps=1",
        "local.optimizer=sgd",
        "local.learning_rate=1.0",
        "server.step=adam",
        "server.learning_rate=0.01",
        "privacy.mechanism=dp-sgd",
        "privacy.epsilon=1",
        "privacy.accountant=rdp",
        "privacy.trust=distributed",
        "privacy.noise=test",
    )
    config = tiny_config(*settings)
    experiment = Experiment.of(config, None)
    before = initial_state(experiment.method, experiment.federation, config).server.blocks
    after = train(config, tmp_path / "run").generator().server.blocks
    for key, block in before.items():
        for name, tensor in block.items():
            moved = (after[key][name] - tensor).abs()
            assert moved.max().item() == pytest.approx(0.01, rel=1e-3)
            assert (moved > 0.0099).double().mean().item() > 0.999  # all but gradients of hardly any length


def test_a_method_that_averages_nothing_has_nothing_to_move() -> None:
    with pytest.raises(ConfigError, match="'adam' has nothing to move: method 'align_fl' averages no block"):
        Experiment.of(load_config("demo", ["method.name=align_fl", "server.step=adam"]), None)
