"""Silos whose records are made when they are drawn: the same run as if all were there, and no more made than drawn."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fedloom.config import Config, DataConfig, ParticipationConfig
from fedloom.engines.fused_stack import stacks_of
from fedloom.errors import FedloomError
from fedloom.experiment import Experiment
from fedloom.federation.building import build_federation, describe
from fedloom.federation.on_demand import FederationOnDemand, SilosOnDemand
from fedloom.federation.participation import participants
from fedloom.federation.records import Federation, Records, Silo
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.streams import PORTION, Streams
from support import tiny_config

SILOS = 24  # of two groups of 12
made: list[int] = []


def records(number: int, rows: int = 20) -> Records:
    """Images of a silo, a function of its number alone."""
    made.append(number)
    x = torch.randint(0, 256, (rows, 1, 8, 8), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
    return Records(x, torch.zeros(rows, dtype=torch.int64), torch.full((rows,), number * 2 // SILOS))


def on_demand(rows: int = 20) -> FederationOnDemand:
    """The silos as they are made."""
    groups: dict[tuple[int, ...], range] = {(0,): range(12), (1,): range(12, SILOS)}
    silos = SilosOnDemand(partial(records, rows=20), [rows] * SILOS, groups, "test")
    return FederationOnDemand("tiny", silos, records(0), ("a", "b"))


def all_there() -> Federation:
    """The same silos, all in memory."""
    silos = tuple(Silo(f"silo-{number}", records(number)) for number in range(SILOS))
    return Federation("tiny", silos, records(0), ("a", "b"))


def config(*more: str) -> Config:
    """Four of the silos in each of three rounds; each keeps an encoder of its own and Adam's moments."""
    settings = ("participation.rate=0.17", "rounds=3", "sharing.scopes.encoder=silo", "local.keep_optimizer=true")
    return tiny_config("method.name=fissionvae", *settings, *more)


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_a_run_has_the_bits_of_one_whose_silos_are_all_there(engine: str, tmp_path: Path) -> None:
    settings = config(f"engine.name={engine}", "engine.device=cpu", "engine.state_memory=0.01")
    whole = Experiment.of(settings, all_there()).run(tmp_path / "whole").folder
    made.clear()
    drawn = Experiment.of(settings, on_demand()).run(tmp_path / "drawn").folder
    chosen = {silo for row in drawn.metrics() for silo in row["participants"]}
    assert set(made) == chosen | {0, 12}  # and the first of each kind, which was looked at
    assert drawn.egress() == whole.egress()
    ours, theirs = (load_checkpoint(folder.path) for folder in (drawn, whole))
    assert ours.silos.keys() == theirs.silos.keys() == {f"silo-{number}" for number in chosen}
    for name, tensors in [*theirs.silos.items(), ("", theirs.server)]:
        own = ours.silos[name] if name else ours.server
        assert all(torch.equal(own[key], tensor) for key, tensor in tensors.items())


def test_an_engine_gets_ready_for_those_that_are_drawn() -> None:
    experiment = Experiment.of(config(), on_demand())
    chosen = {silo for number in (1, 2, 3) for silo in experiment.context(number).participants}
    (stack,) = stacks_of([experiment.trainer], torch.device("cpu"))
    assert {member.index for member in stack.members} == chosen != set(range(SILOS))


def test_it_is_resumed_and_measured(tmp_path: Path) -> None:
    settings = config("evaluation.metrics=['cost']", "evaluation.every=1", "engine.keep_checkpoints=3")
    straight = Experiment.of(settings, on_demand()).run(tmp_path / "straight")
    begun = Experiment.of(settings, on_demand()).begin(tmp_path / "resumed").folder
    for round_number in (1, 2):  # as a kill after the second round would leave it
        for name in ("metrics.jsonl", "egress.jsonl"):
            (begun.path / name).write_bytes((straight.folder.path / name).read_bytes())
        source = straight.folder.path / "checkpoints" / f"round-{round_number:04d}"
        target = begun.path / "checkpoints" / source.name
        target.mkdir(parents=True)
        for file in source.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
    resumed = Experiment.of(settings, on_demand()).resume(begun)
    ours, theirs = (load_checkpoint(run.folder.path).server for run in (resumed, straight))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    found = resumed.metrics()[-1]
    assert found["cost/bytes-up/n3"] == sum(row["bytes"] for row in resumed.folder.egress())


def test_a_silo_must_be_made_as_it_was_declared() -> None:
    with pytest.raises(FedloomError, match=r"'silo-0' was made with 20 records .* 21 of the groups"):
        on_demand(rows=21)
    with pytest.raises(FedloomError, match="looks at the records of every silo"):
        list(on_demand().silos)
    with pytest.raises(FedloomError, match="each of the 3 silos once"):
        SilosOnDemand(records, [20] * 3, {(0,): range(2), (1,): range(1, 3)}, "test")


def test_what_needs_every_silo_is_refused() -> None:
    for setting in ("privacy.mechanism=dp-sgd", "audit.canaries=8", "data.layout=centralised"):
        with pytest.raises(FedloomError, match="silos that are all there before the run"):
            Experiment.of(config(setting), on_demand())


def test_a_worker_process_makes_the_same_records() -> None:
    silos = on_demand().silos
    again = pickle.loads(pickle.dumps(silos))
    assert torch.equal(again[13].train.x, silos[13].train.x)


def test_drawn_silos_hold_different_records_of_their_group_and_are_the_seeds() -> None:
    data = DataConfig(source="mixed-mnist-sample", partition="drawn", silos=500_000, records_per_silo=30)
    federation = build_federation(data, Streams(3))
    assert (len(federation), federation.held) == (1_000_000, 30_000_000)
    assert [(each.name, each.groups, each.records) for each in describe(federation)] == [
        ("silo-0", ("mnist",), 30),
        ("silo-500000", ("fashion-mnist",), 30),
    ]
    last = federation.silos[999_999].train
    assert last.group.unique().tolist() == [1]
    assert len(last.x.flatten(1).unique(dim=0)) == 30
    again, other = (build_federation(data, Streams(seed)) for seed in (3, 4))
    assert torch.equal(again.silos[999_999].train.x, last.x)
    assert not torch.equal(other.silos[999_999].train.x, last.x)
    assert again.digest == federation.digest
    assert build_federation(replace(data, silos=499_999), Streams(3)).digest != federation.digest


@pytest.mark.parametrize("mode", ["fixed", "bernoulli"])
def test_a_draw_among_very_many_is_that_of_all_at_once(mode: str) -> None:
    silos, streams = 2 * PORTION + 5, Streams(9)
    drawn = participants(ParticipationConfig(mode=mode, rate=0.001), silos, 7, streams)  # type: ignore[arg-type]
    if mode == "bernoulli":
        coins = streams.uniform("participation", silos, round=7).tolist()
        expected = [silo for silo, coin in enumerate(coins) if coin < 0.001]
    else:
        expected = sorted(streams.permutation("participation", silos, round=7)[:131].tolist())
    assert list(drawn) == expected
