"""Runs whose groups are found: by every engine, once and for all, and refused where there is nothing to find."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedloom
from fedloom.config import Config
from fedloom.discovery.grouping import unnamed, with_groups
from fedloom.errors import ConfigError, DataError, FedloomWarning
from fedloom.evaluation.cost import silo_cost
from fedloom.experiment import Experiment
from fedloom.federation.building import build_federation
from fedloom.federation.rounds import Site
from fedloom.methods.steps import ServerState
from fedloom.privacy.ledger import Ledger
from fedloom.reports.report import write_report
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.streams import Streams
from support import assert_same_run, equal_bits, tiny_config

SEARCH = ("data.groups=discover", "data.silos=3", "data.records_per_silo=120")
TRUE = {f"{source}-{n}": f"group-{g}" for g, source in ((1, "mnist"), (2, "fashion-mnist")) for n in range(3)}
PRIVATE = ("privacy.mechanism=dp-sgd", "privacy.epsilon=8", "privacy.shares.discovery=0.3")


def searching(*more: str) -> Config:
    return tiny_config(*SEARCH, *more)


@pytest.mark.parametrize("engine", ["reference", "fused"])
@pytest.mark.parametrize("privacy", [(), PRIVATE], ids=["exact", "private"])
def test_the_true_groups_are_found_and_each_gets_its_copy(
    tmp_path: Path, engine: str, privacy: tuple[str, ...]
) -> None:
    run = fedloom.train(searching(f"engine.name={engine}", "engine.workers=0", "engine.threads=0", *privacy), tmp_path)
    assert run.folder.discovery is not None
    assert run.folder.discovery.groups == TRUE
    generator = run.generator()
    assert generator.groups == ("group-1", "group-2")
    assert {str(key) for key in generator.server.blocks} >= {"decoder@group=group-1", "decoder@group=group-2"}
    assert [(row["round"], list(row["payloads"])) for row in run.folder.egress()[:6]] == [
        (0, ["records", "discovery"])
    ] * 6


def test_what_was_found_trains_as_if_it_had_been_known(tmp_path: Path) -> None:
    known = replace(build_federation(tiny_config(*SEARCH[1:]).data, Streams(1)), groups=("group-1", "group-2"))
    named = fedloom.train(tiny_config(*SEARCH[1:]), tmp_path / "known", known)
    found = fedloom.train(searching(), tmp_path / "found")
    one, other = (load_checkpoint(run.folder.path).server for run in (found, named))
    assert equal_bits(one, other)


@pytest.mark.parametrize("privacy", [(), (*PRIVATE, "privacy.noise=test")], ids=["exact", "private"])
def test_a_resumed_run_keeps_its_groups_and_pays_for_them_once(tmp_path: Path, privacy: tuple[str, ...]) -> None:
    config = searching(*privacy)
    fedloom.train(config, tmp_path / "whole")
    experiment = Experiment.of(config)
    begun = experiment.begin(tmp_path / "stopped")  # stopped before its first round
    kept = (begun.folder.path / "discovery.json").read_bytes()
    experiment.take_up(begun.folder)
    fedloom.resume(begun.folder.path)
    assert (begun.folder.path / "discovery.json").read_bytes() == kept
    assert_same_run(tmp_path / "whole", begun.folder.path)
    if privacy:
        charges = Ledger(begun.folder.ledger, read_only=True).charges(config.digest(), "mnist-0")
        assert [(charge.round, charge.release) for charge in charges if charge.release == "discovery"] == [
            (0, "discovery")
        ]


def test_a_release_that_was_cut_off_is_made_again_and_costs_nothing_more(tmp_path: Path) -> None:
    config = searching(*PRIVATE)
    folder = Experiment.of(config).begin(tmp_path).folder
    egress, kept = folder.egress(), folder.discovery
    (folder.path / "discovery.json").unlink()  # the charge was made, and what it paid for was not written down
    Experiment.of(config).take_up(folder)
    assert (folder.egress(), folder.discovery) == (egress, kept)
    assert len(Ledger(folder.ledger, read_only=True).events("mnist-0")) == 1


def test_without_groups_there_is_one_and_somebody_is_told(tmp_path: Path) -> None:
    config = searching("data.source=mnist-sample", "data.partition=iid", "data.silos=8")
    with pytest.warns(FedloomWarning, match="no groups were found: .*; all silos go on as one"):
        run = fedloom.train(config, tmp_path)
    assert run.generator().groups == ("all",)
    assert run.folder.discovery is not None
    assert set(run.folder.discovery.groups.values()) == {"all"}


def test_as_many_groups_as_are_asked_for(tmp_path: Path) -> None:
    run = fedloom.train(searching("discovery.groups=3"), tmp_path)
    assert run.generator().groups == ("group-1", "group-2", "group-3")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("method.name=fedvae",), "needs a block of scope 'group', and method 'fedvae' has none"),
        (("data.silos=2",), "needs at least 6 silos, and 'mixed-mnist-sample' has 4"),
        (("data.layout=centralised",), "needs data.layout = 'federated'"),
        (("discovery.groups=7",), "discovery.groups = 7 must be at most 6"),
    ],
)
def test_where_nothing_can_be_found_one_sentence_says_so(
    tmp_path: Path, settings: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fedloom.train(searching(*settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_was_found_is_no_part_of_the_data() -> None:
    """A budget belongs to records: those of a silo are the same before and after its group is known."""
    source = build_federation(searching().data, Streams(0))
    before, after = unnamed(source), with_groups(source, TRUE, Streams(0))
    assert before.digest == after.digest != source.digest
    assert [silo.digest for silo in before.silos] == [silo.digest for silo in after.silos]
    assert [silo.groups for silo in after.silos] == [(0,)] * 3 + [(1,)] * 3


def test_held_out_records_go_where_records_like_them_are_trained_on() -> None:
    source = build_federation(searching().data, Streams(0))
    assert torch.equal(with_groups(source, TRUE, Streams(0)).test.group, source.test.group)
    halved = {name: "group-2" if name == "mnist-2" else group for name, group in TRUE.items()}
    dealt = with_groups(source, halved, Streams(0)).test.group
    mnist = source.test.group == 0
    assert bool((dealt[~mnist] == 1).all())
    assert (dealt[mnist] == 1).double().mean().item() == pytest.approx(1 / 3, abs=0.05)


def test_groups_of_other_silos_are_refused() -> None:
    source = build_federation(searching().data, Streams(0))
    with pytest.raises(DataError, match="not those of the silos"):
        with_groups(source, {**TRUE, "mnist-0": "elsewhere"}, Streams(0))


def test_what_left_before_the_first_round_counts_as_bytes_and_not_as_a_round() -> None:
    rows = [{"round": number, "silo": "a", "bytes": size} for number, size in ((0, 5), (1, 7), (2, 7))]
    method = Experiment.of(tiny_config()).method
    cost = silo_cost(method, ServerState({}), Site("a", (0,)), rows)
    assert (cost.rounds, cost.bytes_up) == (2, 19)


def test_the_report_has_a_map_of_the_silos(tmp_path: Path) -> None:
    run = fedloom.train(searching(), tmp_path / "run")
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Groups that nobody named" in page
    assert run.folder.discovery is not None
    assert run.folder.discovery.sentence in page
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["runs"][0]
    assert told["groups"] == ["group-1", "group-2"]
    assert {silo["name"]: silo["groups"] for silo in told["silos"]} == {name: [g] for name, g in TRUE.items()}
    (run.folder.path / "discovery.json").write_text('{"silos": 3}')
    write_report([run], tmp_path / "report.html")
    assert "discovery.json cannot be read" in (tmp_path / "report.html").read_text(encoding="utf-8")
