"""A federation of separate processes with TLS, keys and the proxy: the same result, whatever is killed on the way."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from fedloom.config import Config
from fedloom.deployment.demo import Neighbourhood, running, settle
from fedloom.deployment.following import resume_at, run_at
from fedloom.deployment.homes import Invitation, SiloHome
from fedloom.deployment.joining import Joining
from fedloom.deployment.keys import make_server_certificate
from fedloom.deployment.processes import Child
from fedloom.deployment.serving import Serving
from fedloom.engines.flower.rules import RoundRules
from fedloom.engines.flower.shelf import Shelf
from fedloom.errors import FedloomError
from fedloom.experiment import train
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.privacy.ledger import read_accounts
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.files import read_lines
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from support import equal_bits, tiny_config

pytestmark = pytest.mark.system
RULES = RoundRules(deadline=240.0, grace=200.0, minimum=1, extensions=0)
DP = ("privacy.mechanism=dp-sgd", "privacy.epsilon=8.0", "local.batch_size=8", "privacy.accountant=filter")
METHODS = {
    "fissionvae-d": ("method.name=fissionvae",),
    "align-fl": ("method.name=align_fl", "server.samples=32", "server.epochs=1"),
    "dp-sgd": ("method.name=fedvae", *DP),
}
POLICY = """\
methods = ["fedvae", "fissionvae", "align_fl"]
blocks = ["encoder", "decoder"]
privacy = "none"
noise = "test"
"""
PRIVATE = POLICY.replace('"none"', '"dp-sgd"') + "max_epsilon = 8.0\nmax_delta = 0.1\n"


def config_of(*overrides: str) -> Config:
    return tiny_config("engine.name=reference", "rounds=2", "data.silos=2", *overrides)


@dataclass
class Place:
    """A running federation of three silos."""

    folder: Path
    federation: Federation
    place: Neighbourhood
    serving: Serving
    joined: list[Joining]
    said: list[str] = field(default_factory=list)

    def run(self, name: str, *overrides: str) -> Path:
        """A run, and beside it the reference's."""
        config = config_of(*overrides)
        train(config, self.folder / f"{name}-reference", self.federation)
        run_at(self.place.server, config, self.folder / name, self.said.append)
        return self.folder / name

    def resume(self, name: str) -> None:
        resume_at(self.place.server, RunFolder.open(self.folder / name), self.said.append)

    def same(self, name: str) -> bool:
        ours, theirs = load_checkpoint(self.folder / name), load_checkpoint(self.folder / f"{name}-reference")
        return ours.round == theirs.round and equal_bits(ours.server, theirs.server)

    def events(self, name: str, kind: str) -> list[tuple[int, str]]:
        rows = read_lines(self.folder / name / "silos.jsonl")
        return [(row["round"], row["silo"]) for row in rows if row["event"] == kind]

    def reasons(self, name: str, kind: str) -> list[str]:
        rows = read_lines(self.folder / name / "silos.jsonl")
        return [row.get("reason", "") for row in rows if row["event"] == kind]

    @contextlib.contextmanager
    def ruled(self, rules: RoundRules) -> Iterator[None]:
        """Other rules for the runs of a block: the server reads them at a run's start."""
        path = self.place.server.path / "federation.toml"
        before = path.read_text()
        tree = {"charter": self.place.server.charter.to_mapping(), "server": asdict(self.place.server.settings)}
        path.write_text(tomli_w.dumps(tree | {"rounds": asdict(rules)}))
        try:
            yield
        finally:
            path.write_text(before)

    def when(self, name: str, kind: str, event: tuple[int, str], do: Callable[[], None]) -> threading.Thread:
        """Do something once, as soon as an event is in a run's journal."""

        def watch() -> None:
            end = time.monotonic() + 200
            while event not in self.events(name, kind) and time.monotonic() < end:
                time.sleep(0.1)
            do()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        return thread

    def wait_until_all_are_there(self) -> None:
        end = time.monotonic() + 150
        while time.monotonic() < end:
            nodes = self.serving.control.nodes()
            ready = ["ready" in silo.worker.last_words(1000) for silo in self.joined]
            if all(ready) and sum(node.status == "online" for node in nodes) == len(self.joined):
                return
            time.sleep(2)
        raise AssertionError(f"not all silos came: {nodes}")


def pid(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    config, folder = config_of(), tmp_path_factory.mktemp("federation")
    whole = build_federation(config.data, Streams(config.seed))
    federation = replace(whole, silos=whole.silos[:3])
    found = settle(folder, federation, POLICY, RULES, proxy=True)
    said: list[str] = []
    with running(found, said.append, proxy=True) as (serving, joined):
        place = Place(folder, federation, found, serving, joined, said)
        place.wait_until_all_are_there()
        yield place


@pytest.mark.parametrize("name", METHODS)
def test_separate_processes_learn_what_the_reference_engine_learns(place: Place, name: str) -> None:
    for home in place.place.silos:
        (home.path / "policy.toml").write_text(PRIVATE if name == "dp-sgd" else POLICY)
    run = place.run(name, *METHODS[name])
    assert place.same(name)
    assert RunFolder.open(run).status["state"] == "finished"
    assert not (run / "ledger.sqlite").exists()
    assert all("train/" not in key for row in read_lines(run / "metrics.jsonl") for key in row if "server" not in key)
    if name == "dp-sgd":
        theirs = {account.silo: account for account in read_accounts(place.folder / f"{name}-reference/ledger.sqlite")}
        for home in place.place.silos:
            assert read_accounts(home.path / "ledger.sqlite") == [theirs[home.name]]
            assert theirs[home.name].spent > 0
            (home.path / "policy.toml").write_text(POLICY)


def test_the_proxy_lets_nobody_at_the_controls(place: Place) -> None:
    context = ssl.create_default_context(cafile=str(place.place.server.keys / "ca.crt"))

    def status(path: str, port: int) -> int:
        headers = {"Content-Type": "application/protobuf"}
        request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", b"", headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    outside, inside = place.place.server.charter.port, place.place.server.settings.port
    for path in ("/v1/control/list-runs", "/v1/control/start-run", "/v1/control/register-node", "/health", "/docs"):
        assert status(path, outside) == 404
    assert status("/v1/control/list-runs", inside) != 404  # there is something to keep people from
    assert status("/v1/fleet/pull-messages", outside) == 401  # Flower asks who calls
    assert status("/v1/fleet/register-node", outside) == 404


def test_a_worker_that_is_killed_in_mid_round_is_started_again(place: Place) -> None:
    name, silo = "worker-killed", place.joined[0]
    os.kill(pid(silo.worker), signal.SIGSTOP)  # so that it cannot answer before it is killed
    log = silo.home.logs / "supernode.log"
    received = log.read_text().count("Received successfully")

    def kill() -> None:
        while log.read_text().count("Received successfully") == received:
            time.sleep(0.2)
        time.sleep(15)  # in which Flower starts the process that asks the worker
        os.kill(pid(silo.worker), signal.SIGKILL)

    place.when(name, "asked", (1, silo.home.name), kill)
    place.run(name, *METHODS["fissionvae-d"])
    assert (1, silo.home.name) in place.events(name, "failed")
    assert any("the silo's worker ended before it had answered" in reason for reason in place.reasons(name, "failed"))
    assert place.same(name)


def test_a_full_disk_at_a_silo_is_said_and_the_run_goes_on(place: Place) -> None:
    name, silo = "disk-full", place.joined[1]
    resource.prlimit(pid(silo.worker), resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        run = place.run(name, *METHODS["fissionvae-d"])
    finally:
        resource.prlimit(pid(silo.worker), resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [row["participants"] for row in RunFolder.open(run).metrics()] == [[0, 2], [0, 2]]
    assert set(place.reasons(name, "failed")) == {f"silo '{silo.home.name}' failed; its own log says why"}
    kept = silo.home.path / "rounds" / RunFolder.open(run).environment["engine_choice"]["run"]
    assert kept.is_dir()
    assert Shelf(kept).rounds() == []


def test_a_slow_silo_is_not_waited_for_beyond_the_deadline(place: Place) -> None:
    name, silo = "slow", place.joined[2]
    os.kill(pid(silo.worker), signal.SIGSTOP)
    wake = place.when(name, "missing", (1, silo.home.name), lambda: os.kill(pid(silo.worker), signal.SIGCONT))
    with place.ruled(replace(RULES, deadline=40.0)):
        run = place.run(name, *METHODS["fissionvae-d"])
    wake.join()
    assert place.events(name, "missing") == [(1, silo.home.name)]
    assert place.events(name, "late") == [(1, silo.home.name)]
    assert [row["participants"] for row in RunFolder.open(run).metrics()] == [[0, 1], [0, 1, 2]]


def test_a_server_that_is_killed_goes_on_as_a_new_run(place: Place) -> None:
    name, silo = "superlink-killed", place.joined[0].home.name
    kill = place.when(
        name, "asked", (2, silo), lambda: (time.sleep(2), os.killpg(pid(place.serving.superlink), signal.SIGKILL))
    )
    with pytest.raises(FedloomError, match="the run's process at the server has ended"):
        place.run(name, *METHODS["fissionvae-d"])
    kill.join()
    assert RunFolder.open(place.folder / name).rounds_done == 1
    end = time.monotonic() + 60
    while not place.serving.control.answers and time.monotonic() < end:
        time.sleep(1)
    place.wait_until_all_are_there()
    place.resume(name)
    assert place.same(name)


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_node_that_is_killed_comes_back(place: Place, moment: str) -> None:
    """With time enough for it nothing is missing in the end: the result is that of an undisturbed run."""
    name, silo = f"node-killed-{moment}", place.joined[1]

    def kill() -> None:
        os.killpg(pid(silo.node), signal.SIGKILL)

    if moment == "before":
        kill()
    else:
        kind = {"during": "asked", "after": "answered"}[moment]
        place.when(name, kind, (1, silo.home.name), kill)
    place.run(name, *METHODS["fissionvae-d"])
    assert place.same(name)
    place.wait_until_all_are_there()


def test_a_silo_joins_once(place: Place, tmp_path: Path) -> None:
    silo = place.joined[0]
    with (
        pytest.raises(FedloomError, match=f"silo '{silo.home.name}' has joined already"),
        Joining(silo.home, silo.data, place.said.append),
    ):
        pass
    copy = tmp_path / "copy"
    shutil.copytree(silo.home.path, copy)
    assert "does not let this silo in" in refusal(SiloHome.open(copy), silo.data)
    place.run("joined-twice", *METHODS["fissionvae-d"])
    assert place.same("joined-twice")


def test_records_that_do_not_fit_are_told_to_the_silo_alone(place: Place, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(place.joined[0].home.path, copy)
    np.savez(tmp_path / "other.npz", x_train=np.zeros((4, 5, 5), np.uint8))
    with Joining(SiloHome.open(copy), tmp_path / "other.npz", place.said.append) as joining:
        assert joining.worker.process is not None
        joining.worker.process.wait(60)
        with pytest.raises(FedloomError, match=r"^'other' holds records of shape \(1, 5, 5\), the charter says"):
            joining.tend()


def test_a_key_that_was_not_admitted_is_turned_away(place: Place, tmp_path: Path) -> None:
    invitation = Invitation.read(place.place.server.path / "invitations" / f"{place.joined[0].home.name}.toml")
    stranger = SiloHome.create(tmp_path / "stranger", invitation)
    assert "the server does not let this silo in: its key is not admitted" in refusal(stranger, place.joined[0].data)


def test_a_server_of_another_authority_is_not_trusted(place: Place, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(place.joined[0].home.path, copy)
    other = settle(tmp_path / "other", place.federation, POLICY, RULES, proxy=True)
    shutil.copy(other.server.keys / "ca.crt", copy / "ca.crt")
    assert "certificate is not one of this federation, or has expired" in refusal(
        SiloHome.open(copy), place.joined[0].data
    )


def test_an_expired_certificate_keeps_silos_away_until_it_is_renewed(place: Place, tmp_path: Path) -> None:
    keys, copy = place.place.server.keys, tmp_path / "copy"
    shutil.copytree(place.joined[0].home.path, copy)
    proxy = place.serving.household.children[-1]
    assert proxy.name == "proxy"
    make_server_certificate(keys, "127.0.0.1", days=-1)
    os.kill(pid(proxy), signal.SIGHUP)  # nginx reads its files again
    try:
        assert "has expired" in refusal(SiloHome.open(copy), place.joined[0].data)
    finally:
        make_server_certificate(keys, "127.0.0.1")
        os.kill(pid(proxy), signal.SIGHUP)
    place.wait_until_all_are_there()


def refusal(home: SiloHome, data: Path) -> str:
    """What a silo says that cannot join."""
    said: list[str] = []
    with Joining(home, data, said.append) as joining:
        end = time.monotonic() + 60
        while not any(line.startswith("supernode") for line in said) and time.monotonic() < end:
            joining.tend()
            time.sleep(0.5)
        return "\n".join([*said, joining.node.last_words(5)])
