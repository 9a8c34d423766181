"""Groups found of silos that are elsewhere: the same as in simulation, and each silo pays for itself."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.config import Config
from fedloom.discovery.grouping import with_groups
from fedloom.engines.remote import rounds
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.rounds import ShortRoundError
from fedloom.engines.remote.work import REFUSED, Order, refusal, update_frame, update_in
from fedloom.errors import FedloomWarning
from fedloom.experiment import Experiment, train
from fedloom.federation.building import build_federation
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import some_model
from fedloom.privacy.ledger import Ledger
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from local_grid import Deployment, remote
from support import equal_bits, tiny_config

PRIVATE = (
    "privacy.mechanism=dp-sgd",
    "privacy.epsilon=8",
    "privacy.accountant=filter",
    "privacy.shares.discovery=0.3",
    "privacy.noise=test",
)
GROUPS = {f"{source}-{n}": f"group-{g}" for g, source in ((1, "mnist"), (2, "fashion-mnist")) for n in range(3)}


def searching(*more: str) -> Config:
    known = ("data.groups=discover", "data.silos=3", "data.records_per_silo=120", "rounds=2", "local.batch_size=8")
    return tiny_config("engine.name=reference", *known, *more)


def deployed(path: Path, config: Config) -> Deployment:
    return Deployment(path, config, build_federation(config.data, Streams(config.seed)))


@pytest.mark.parametrize("privacy", [(), PRIVATE], ids=["exact", "private"])
def test_silos_elsewhere_are_grouped_as_in_simulation_and_learn_the_same(
    tmp_path: Path, privacy: tuple[str, ...]
) -> None:
    config = searching(*privacy)
    deployment = deployed(tmp_path, config)
    train(config, tmp_path / "reference", deployment.federation)
    found = deployment.run().folder.discovery
    assert found == RunFolder.open(tmp_path / "reference").discovery
    assert found is not None
    assert found.groups == GROUPS
    ours, theirs = load_checkpoint(tmp_path / "server"), load_checkpoint(tmp_path / "reference")
    assert equal_bits(ours.server, theirs.server)
    if privacy:
        with closing(Ledger(deployment.home(0) / "ledger.sqlite", read_only=True)) as ledger:
            charged = [(charge.round, charge.release) for charge in ledger.charges("run-1", "mnist-0")]
        assert charged == [(0, "discovery"), (1, "update"), (2, "update")]


def test_a_silo_is_told_its_own_group_and_no_others(tmp_path: Path) -> None:
    deployment, told = deployed(tmp_path, searching()), list[tuple[str, int, object]]()

    for silo, handler in deployment.grid.handlers.items():

        def heard(frame: Frame, silo: str = silo, handler=handler) -> Frame:  # type: ignore[no-untyped-def]
            told.append((silo, frame.header["round"], frame.header.get("group")))
            assert not any(other in str(frame.header) for other in GROUPS)
            return handler(frame)  # type: ignore[no-any-return]

        deployment.grid.handlers[silo] = heard
    deployment.run()
    rounds = [(silo, number, group) for number in (1, 2) for silo, group in GROUPS.items()]
    assert sorted(told, key=str) == sorted([(silo, 0, None) for silo in GROUPS] + rounds, key=str)


def test_a_run_that_stopped_before_groups_were_found_asks_again_and_is_sent_the_same(tmp_path: Path) -> None:
    deployment = deployed(tmp_path, searching(*PRIVATE))
    honest = deployment.grid.handlers["mnist-1"]
    deployment.grid.handlers["mnist-1"] = lambda _: refusal("not today")
    with pytest.raises(ShortRoundError, match="round 0 has 5 of the 6 updates"):
        deployment.run()
    sent = RunFolder.open(deployment.home(0) / "runs" / "run-1").egress()
    deployment.grid.handlers["mnist-1"] = honest
    run = deployment.run()
    assert run.folder.discovery is not None
    assert run.folder.discovery.groups == GROUPS
    own = RunFolder.open(deployment.home(0) / "runs" / "run-1").egress()
    assert [row["round"] for row in own] == [0, 1, 2]
    assert own[:1] == sent
    assert run.folder.egress()[0]["sha256"] == sent[0]["sha256"]


def test_once_a_silo_has_refused_nobody_waits_for_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, ticks = deployed(tmp_path, searching()), itertools.count()
    monkeypatch.setattr(rounds, "clock", lambda: float(next(ticks)) if len(deployment.told("answered")) == 4 else 0.0)
    monkeypatch.setattr(rounds, "TICK", 0.01)
    deployment.grid.handlers["mnist-1"] = lambda _: refusal("not today")
    deployment.grid.offline.add("mnist-2")
    with pytest.raises(ShortRoundError, match="round 0 has 4 of the 6 updates"):
        deployment.run()
    assert next(ticks) < deployment.rules.deadline


def test_nothing_is_trained_for_who_was_told_no_group_that_can_be(tmp_path: Path) -> None:
    config = searching()
    deployment = deployed(tmp_path, config)
    order = Order("run-1", config, RoundContext(1, 2, tuple(range(6))), settled=0)
    for wrong, sentence in (
        (order, "was not told its group"),
        (replace(order, groups=("group-1", "group-2"), group="group-3"), "'group-3' is none of the groups"),
        (replace(order, groups=("mine",), group="mine"), "'mine' is none of the groups"),
    ):
        answer = deployment.service(0).answer(wrong.frame({}))
        assert answer.kind == REFUSED
        assert sentence in str(answer.header["reason"])


def test_silos_elsewhere_that_do_not_differ_are_one_group(tmp_path: Path) -> None:
    config = searching("data.source=mnist-sample", "data.partition=iid", "data.silos=8", "rounds=1")
    with pytest.warns(FedloomWarning, match="no groups were found"):
        run = deployed(tmp_path, config).run()
    assert run.generator().groups == ("all",)


def test_a_public_set_goes_where_the_silos_of_its_group_are() -> None:
    source = build_federation(searching().data, Streams(1))
    server = replace(remote(source), test=source.test)
    assert torch.equal(with_groups(server, GROUPS, Streams(1)).test.group, source.test.group)


def test_blocks_before_the_first_round_are_not_taken(tmp_path: Path) -> None:
    deployment = deployed(tmp_path, searching())
    honest = deployment.grid.handlers["mnist-1"]
    experiment = Experiment.of(deployment.config, remote(deployment.federation))
    plan, site = experiment.method.plan, Site("mnist-1", (0,))
    blocks = plan.split(some_model(experiment.method, site).state_dict(), site)

    def eager(frame: Frame) -> Frame:
        return update_frame(replace(update_in(honest(frame), "mnist-1"), blocks=blocks))

    deployment.grid.handlers["mnist-1"] = eager
    with pytest.raises(ShortRoundError, match="silo 'mnist-1' sent blocks before the first round"):
        deployment.run()
