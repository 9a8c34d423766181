from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.config import Config
from fedloom.engines.base import FederationState, Job, RoundReport, initial_state
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment, train
from fedloom.federation.participation import participants
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.sharing.plan import BlockKey
from fedloom.streams import Streams
from support import assert_same_run, equal_bits, federation_of, logged, tiny_config

ENCODER, A, B = BlockKey("encoder", "all"), BlockKey("decoder", "group=a"), BlockKey("decoder", "group=b")


def one_round(
    federation: Federation, participating: tuple[int, ...], *overrides: str
) -> tuple[FederationState, FederationState, RoundReport, ReferenceEngine]:
    """The state before and after a round of these silos, and the report."""
    config = tiny_config(*overrides)
    method = Experiment.of(config, federation).method
    engine = ReferenceEngine(Trainer(config, method, federation))
    start = initial_state(method, federation, config)
    after, report = engine.round(Job(start, RoundContext(1, 2, participating), lambda _: None))
    return start, after, report, engine


def test_two_workers_equal_one_bit_for_bit(tmp_path: Path) -> None:
    """Silos of unequal size and of both groups, private encoders and kept moments."""
    federation = federation_of([0] * 33, [1] * 7, [0, 1] * 10)
    overrides = ("sharing.scopes.encoder=silo", "local.keep_optimizer=true")
    train(tiny_config(*overrides), tmp_path / "one", federation)
    train(tiny_config(*overrides, "engine.workers=2"), tmp_path / "two", federation)
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_the_same_seed_repeats_a_run_and_another_seed_differs(tmp_path: Path, tiny_federation: Federation) -> None:
    for name, seed in {"one": 1, "again": 1, "other": 2}.items():
        train(tiny_config(f"seed={seed}"), tmp_path / name, tiny_federation)
    assert_same_run(tmp_path / "one", tmp_path / "again")
    one, other = load_checkpoint(tmp_path / "one").server, load_checkpoint(tmp_path / "other").server
    assert all(not torch.equal(one[name], other[name]) for name in one)
    assert logged(tmp_path / "one")["metrics"] != logged(tmp_path / "other")["metrics"]


def test_a_round_is_the_weighted_mean_of_what_its_silos_learned() -> None:
    """10 records of a; 6 of a and 6 of b; 20 of b: each branch weighs its own records, the encoder all of them."""
    federation = federation_of([0] * 10, [0, 1] * 6, [1] * 20)
    start, after, _, engine = one_round(federation, (0, 1, 2))
    tasks = engine.tasks(start, RoundContext(1, 2, (0, 1, 2)))
    sent = [result.update.blocks for result in engine.train(tasks)]
    shares: dict[BlockKey, dict[int, int]] = {ENCODER: {0: 10, 1: 12, 2: 20}, A: {0: 10, 1: 6}, B: {1: 6, 2: 20}}
    for key, counts in shares.items():
        for name, tensor in after.server.blocks[key].items():
            mean = sum(n * sent[i][key][name].double() for i, n in counts.items()) / sum(counts.values())
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-7, atol=1e-7)


def test_a_group_without_participants_keeps_its_branch() -> None:
    start, after, report, _ = one_round(federation_of([0] * 10, [1] * 10, [1] * 5), (0,))
    assert equal_bits(after.server.blocks[B], start.server.blocks[B])
    assert not equal_bits(after.server.blocks[A], start.server.blocks[A])
    assert not equal_bits(after.server.blocks[ENCODER], start.server.blocks[ENCODER])
    assert [record.silo for record in report.egress] == ["silo-0"]


def test_a_round_without_participants_changes_nothing_but_its_number() -> None:
    start, after, report, _ = one_round(federation_of([0] * 10, [1] * 10), ())
    assert after.round == 1
    assert after.server.blocks.keys() == start.server.blocks.keys()
    assert all(equal_bits(after.server.blocks[key], start.server.blocks[key]) for key in start.server.blocks)
    assert (report.egress, report.terms, report.steps) == ((), {}, 0)


def drawn(config: Config, silos: int) -> list[tuple[int, ...]]:
    rounds = range(1, config.rounds + 1)
    return [participants(config.participation, silos, number, Streams(config.seed)) for number in rounds]


def test_a_whole_run_with_rounds_that_miss_a_group_or_everybody(tmp_path: Path) -> None:
    federation = federation_of([0] * 10, [1] * 10)
    candidates = (
        tiny_config("rounds=6", "participation.rate=0.4", f"seed={s}", "engine.keep_checkpoints=6") for s in range(99)
    )
    config = next(c for c in candidates if {(), (0,), (1,), (0, 1)} <= set(drawn(c, 2)))
    train(config, tmp_path / "run", federation)
    rows: list[dict[str, Any]] = logged(tmp_path / "run")["metrics"]
    assert [tuple(row["participants"]) for row in rows] == drawn(config, 2)
    states = [load_checkpoint(tmp_path / "run", number).server for number in range(1, 7)]
    for (before, after), row in zip(itertools.pairwise(states), rows[1:], strict=True):
        moved = {name.split("/")[1] for name in after if not torch.equal(before[name], after[name])}
        groups = {"decoder@group=a" if silo == 0 else "decoder@group=b" for silo in row["participants"]}
        assert moved == (groups | {"encoder@all"} if groups else set())
        assert ("train/vae/loss" in row) is bool(groups)


def test_equal_groups_changes_the_encoder_and_leaves_the_branches() -> None:
    federation = federation_of([0] * 30, [1] * 10)
    _, by_size, _, _ = one_round(federation, (0, 1))
    _, by_group, _, _ = one_round(federation, (0, 1), "sharing.weights=equal-groups")
    assert not equal_bits(by_size.server.blocks[ENCODER], by_group.server.blocks[ENCODER])
    assert equal_bits(by_size.server.blocks[A], by_group.server.blocks[A])


def test_the_loss_of_a_round_is_the_mean_over_its_steps() -> None:
    federation = federation_of([0] * 33, [1] * 5)  # 3 steps and 1 step
    start, _, report, engine = one_round(federation, (0, 1))
    results = list(engine.train(engine.tasks(start, RoundContext(1, 2, (0, 1)))))
    losses = [result.terms["vae/loss"] for result in results]
    assert report.steps == 4
    assert report.terms["vae/loss"] == pytest.approx((3 * losses[0] + losses[1]) / 4)
