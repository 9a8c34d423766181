"""fedloom as an app of somebody else's Flower federation: its two components, called as Flower calls them."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.config import flatten_dict, validate_config

import fedloom
from fedloom.config import Config
from fedloom.deployment.charter import Charter
from fedloom.deployment.demo import write_records
from fedloom.deployment.directories import SiloDirectory
from fedloom.deployment.flower.app import client
from fedloom.deployment.flower.folder import told_in, write_app
from fedloom.deployment.flower.grid_wire import FlowerWire
from fedloom.deployment.flower.messages import answered
from fedloom.deployment.flower.nodes import AGAIN, KnownNodes, name_frame
from fedloom.deployment.hosted import conducting
from fedloom.deployment.hosted.conducting import conduct
from fedloom.deployment.hosted.run import HostedRun
from fedloom.deployment.hosted.seat import Said, answer_at
from fedloom.deployment.link import DEVICE
from fedloom.deployment.signing import Signatory
from fedloom.deployment.status import silo_status
from fedloom.engines.remote.frames import STATE, Frame
from fedloom.engines.remote.secure_frames import SECURE
from fedloom.errors import ConfigError, FedloomError, RunFolderError
from fedloom.experiment import train
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.privacy.ledger import read_accounts
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.files import read_lines
from fedloom.streams import Streams
from local_grid import PROMPT, LocalGrid
from support import equal_bits, tiny_config, wait_for

POLICY = 'methods = ["fissionvae"]\nblocks = ["encoder", "decoder"]\nprivacy = "none"\n'
TINY = ("method.name=fissionvae", "data.silos=1", "data.records_per_silo=16", "engine.name=reference")


class AppGrid(LocalGrid):
    """Flower's grid with SuperNodes that nobody has named, each of which calls the app's own component."""

    def __init__(self, told: dict[str, Any], *nodes: dict[str, str]) -> None:
        super().__init__({str(number): lambda frame: frame for number, _ in enumerate(nodes)})
        self._told = told
        self._configs = dict(zip(self._nodes, nodes, strict=True))

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node.node_id, name="") for node in super().get_nodes()]

    def _answer(self, number: str, message: Message) -> None:
        node = message.metadata.dst_node_id
        with self._turns[self._nodes[node]]:
            reply = client(message, Context(1, node, dict(self._configs[node]), RecordDict(), dict(self._told)))
        self._replies[number] = copy.deepcopy(reply)


@dataclass
class Theirs:
    """A federation of two silos as an app, with their folders and records."""

    path: Path
    config: Config = field(default_factory=lambda: tiny_config(*TINY))

    def __post_init__(self) -> None:
        self.federation: Federation = build_federation(self.config.data, Streams(self.config.seed))
        groups = {silo.name: self.federation.groups[silo.groups[0]] for silo in self.federation.silos}
        self.charter = Charter(
            name="theirs",
            silos=groups,
            shape=self.federation.shape,
            classes=self.federation.classes,
            records={silo.name: len(silo) for silo in self.federation.silos},
            wire="flower",
        )
        self.nodes = [self.seat(silo) for silo in groups]

    def seat(self, silo: str) -> dict[str, str]:
        own = self.federation.silos[self.charter.index(silo)]
        data = self.path / f"{silo}.npz"
        write_records(data, self.federation, own.train, self.federation.test.of_group(own.groups[0]))
        home = self.path / silo
        home.mkdir(parents=True)
        (home / "policy.toml").write_text(POLICY)
        return {"silo": silo, "home": str(home), "data": str(data)}

    @property
    def app(self) -> HostedRun:
        return HostedRun(self.config, self.charter, PROMPT, str(self.path / "run"))

    @property
    def told(self) -> dict[str, Any]:
        """The run's config as Flower makes it of the app's description."""
        return told_by(self.app, self.path / "app")


def told_by(app: HostedRun, folder: Path) -> dict[str, Any]:
    write_app(app, folder)
    description = tomllib.loads((folder / "pyproject.toml").read_text())
    return flatten_dict(description["tool"]["flwr"]["app"]["config"])


def conducted(grid: AppGrid, app: HostedRun) -> Path:
    """As the app's server component does it, which looks for answers less often."""
    return conduct(app, FlowerWire(KnownNodes(grid, app.charter.silos), poll=0.01), "flwr run")


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Theirs]:
    yield Theirs(tmp_path)
    torch.set_flush_denormal(False)  # as a silo's process has it for good


def test_an_app_learns_what_the_reference_engine_learns_and_goes_on_where_it_stopped(
    theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conducting.sys, "argv", ["flwr-serverapp", "--token", "secret"])
    told = theirs.told
    train(theirs.config, theirs.path / "reference", theirs.federation)
    grid = AppGrid(told, *theirs.nodes)
    app = HostedRun.of(told_in(told))
    assert app == theirs.app
    begun = conducted(grid, app)
    ours, expected = load_checkpoint(begun), load_checkpoint(theirs.path / "reference")
    assert ours.round == expected.round == 2
    assert equal_bits(ours.server, expected.server)
    assert "secret" not in (begun / "environment.json").read_text()
    assert {row["event"] for row in read_lines(begun / "silos.jsonl")} == {"asked", "answered"}
    with pytest.raises(FedloomError, match="holds a run that has ended"):
        conducted(grid, app)

    (begun / "status.json").unlink()
    for left in (begun / "checkpoints").glob("round-0002*"):
        left.rename(theirs.path / left.name)
    other = replace(app, config=replace(app.config, seed=5))
    with pytest.raises(FedloomError, match="holds another experiment"):
        conducted(grid, other)
    conducted(AppGrid(told, *theirs.nodes), app)
    assert equal_bits(load_checkpoint(begun).server, expected.server)
    assert all(len(list(Path(node["home"], "runs").iterdir())) == 1 for node in theirs.nodes)  # one run for silos


def test_a_private_run_is_paid_for_once_at_each_silo(tmp_path: Path) -> None:
    private = ("privacy.mechanism=dp-sgd", "privacy.epsilon=8.0", "privacy.noise=test", "privacy.accountant=filter")
    theirs = Theirs(tmp_path, tiny_config(*TINY, *private, "method.name=fedvae", "local.batch_size=8"))
    for node in theirs.nodes:
        policy = POLICY.replace("fissionvae", "fedvae") + 'noise = "test"\nmax_delta = 0.1\n'
        (Path(node["home"]) / "policy.toml").write_text(policy)
    train(theirs.config, theirs.path / "reference", theirs.federation)
    told = theirs.told
    run = conducted(AppGrid(told, *theirs.nodes), HostedRun.of(told_in(told)))
    assert equal_bits(load_checkpoint(run).server, load_checkpoint(theirs.path / "reference").server)
    for node in theirs.nodes:
        (account,) = read_accounts(Path(node["home"]) / "ledger.sqlite")
        assert [(each.name, each.charges) for each in account.releases] == [("update", 2)]


def test_the_description_is_one_that_flower_accepts(theirs: Theirs) -> None:
    assert theirs.told["rounds.deadline"] == 120.0
    description = tomllib.loads((theirs.path / "app" / "pyproject.toml").read_text())
    assert validate_config(description, check_module=True) == (True, [], [])
    assert description["project"]["dependencies"] == []  # Flower would fetch them
    with pytest.raises(RunFolderError, match="exists already"):
        write_app(theirs.app, theirs.path / "app")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("data.layout=centralised",), "no centralised layout"),
        (("audit.canaries=2",), "no canaries"),
        (
            ("privacy.mechanism=dp-sgd", "privacy.trust=distributed", "method.name=fedvae"),
            r"use the wire 'direct' \('fedloom federation init'\)",
        ),
    ],
)
def test_what_such_a_federation_cannot_do_is_said_before_anything_is_sent(
    theirs: Theirs, changes: tuple[str, ...], reason: str
) -> None:
    app = replace(theirs.app, config=tiny_config(*TINY, *changes))
    with pytest.raises(ConfigError, match=reason):
        app.check()


def asked(theirs: Theirs, node: dict[str, str], told: dict[str, Any]) -> str:
    """Why a node does not answer a task."""
    answer = answer_at(Said(node, "this SuperNode's --node-config"), told, Frame({"kind": "task", "version": "0"}))
    assert answer.kind in ("refused", "failed")
    return str(answer.header["reason"])


@pytest.mark.parametrize("kind", [DEVICE, STATE, SECURE])
def test_a_silo_answers_nothing_but_tasks(theirs: Theirs, kind: str) -> None:
    """What a node asks its own worker, or signs on its way, is no matter of who operates a federation of others."""
    answer = answer_at(
        Said(theirs.nodes[0], "a node"), theirs.told, Frame({"kind": kind, "version": fedloom.__version__})
    )
    assert answer.header == {
        "kind": "refused",
        "reason": "a silo in a federation of others answers the tasks of rounds, and nothing else",
    }


def test_a_silo_says_why_it_does_not_work_and_no_more(theirs: Theirs) -> None:
    node, told = theirs.nodes[0], theirs.told
    assert asked(theirs, {**node, "home": ""}, told) == "this SuperNode's --node-config does not say 'home'"
    assert "unknown silo 'other'" in asked(theirs, {**node, "silo": "other"}, told)
    assert not SiloDirectory.is_at(Path(node["home"]))  # nothing was agreed to
    assert "the server runs fedloom 0" in asked(theirs, node, told)
    hidden = asked(theirs, {**node, "data": str(theirs.path / "secret-name.npz")}, told)
    assert hidden == f"silo '{node['silo']}' failed; its own log says why"
    assert "secret-name" in (Path(node["home"]) / "logs" / "silo.log").read_text()
    (Path(node["home"]) / "policy.toml").write_text("methods = 3")
    assert hidden == asked(theirs, node, told)


def test_a_silo_keeps_to_the_charter_of_its_first_run(theirs: Theirs) -> None:
    """Its draws and its weight hang on who else is in it, and in which order."""
    node, told = theirs.nodes[0], theirs.told
    asked(theirs, node, told)
    turned = replace(theirs.charter, silos=dict(reversed(theirs.charter.silos.items())))
    for number, charter in enumerate((turned, replace(theirs.charter, records={}))):
        other = told_by(replace(theirs.app, charter=charter), theirs.path / f"app-{number}")
        assert "has agreed to another charter than this run's" in asked(theirs, node, other)
    assert "the server runs fedloom 0" in asked(theirs, node, told)


def test_a_new_silo_agrees_to_nothing_and_its_status_says_so(theirs: Theirs) -> None:
    node = {**theirs.nodes[0], "home": str(theirs.path / "new" / "home")}
    grid = AppGrid(theirs.told, node, theirs.nodes[1])
    app = replace(theirs.app, rules=replace(PROMPT, minimum=2))
    with pytest.raises(FedloomError, match="1 of"):
        conducted(grid, app)
    home = SiloDirectory.open(Path(node["home"]))
    with pytest.raises(FedloomError, match="has no key to sign with"):
        Signatory.of(home)
    found = silo_status(home)
    assert (found["silo"], found["joined"]) == (node["silo"], False)
    (line,) = found["refused"]
    assert "policy.toml allows methods = none" in line


class Register(LocalGrid):
    """Nodes as Flower's register and their own words name them."""

    def __init__(self, nodes: dict[int, tuple[str, str]]) -> None:
        super().__init__({})
        self.nodes, self.asked = nodes, list[int]()

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node, name=name) for node, (name, _) in self.nodes.items()]

    def push_messages(self, messages: list[Message]) -> list[str]:
        self.asked += [message.metadata.dst_node_id for message in messages]
        return super().push_messages(messages)

    def _answer(self, number: str, message: Message) -> None:
        word = self.nodes[message.metadata.dst_node_id][1]
        error = Error(code=2, reason="ModuleNotFoundError: fedloom")
        reply = answered(name_frame(word), message) if word else Message(error, reply_to=message)
        self._replies[number] = reply


def test_flower_s_register_goes_before_what_a_node_says_and_two_of_one_name_are_none() -> None:
    now = 0.0
    said = {2: "south", 3: "stranger", 4: "west", 5: "west", 6: ""}
    nodes = {1: ("north", "south")} | {node: ("", word) for node, word in said.items()}
    grid = Register(nodes)
    known = KnownNodes(grid, ("north", "south", "west"), lambda: now)

    def names() -> dict[int, str]:
        return {node.node_id: node.name for node in known.get_nodes()}

    wait_for(lambda: names() == {1: "north", 2: "south"}, "the nodes have said who they are")
    assert sorted(grid.asked) == [2, 3, 4, 5, 6]  # once each
    del nodes[5]
    assert names() == {1: "north", 2: "south", 4: "west"}
    now = AGAIN
    names()
    assert sorted(grid.asked) == [2, 3, 4, 5, 6, 6]  # who could not say is asked again
