"""Secure sums of five real silos, each in processes of its own: the simulation's integers, whoever is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fedloom.config import Config
from fedloom.deployment.demo import Neighbourhood, running, settle
from fedloom.deployment.directories import known_fingerprints
from fedloom.deployment.joining import Joining
from fedloom.deployment.tail import run_at
from fedloom.engines.remote.rules import RoundRules
from fedloom.errors import FedloomError
from fedloom.experiment import Experiment
from fedloom.federation.records import Federation
from fedloom.privacy.ledger import read_accounts
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.files import read_lines
from fedloom.runs.folder import RunFolder
from fedloom.sharing.plan import Tensors
from places import pid
from secure_deployment import SEEDED, five, grouped, shared_config

pytestmark = pytest.mark.system
POLICY = """\
methods = ["moments", "refined_moments", "fissionvae", "dp_cvae"]
payloads = ["records", "moments", "centre", "gradient", "class-counts"]
blocks = ["encoder", "decoder"]
privacy = "none"
noise = "test"

[silos]
"""
RULES = RoundRules(deadline=60.0, grace=20.0)


def founded(folder: Path, federation: Federation) -> Neighbourhood:
    """Silos whose operators have told each other the fingerprints of their keys."""
    place = settle(folder, federation, POLICY, RULES)
    known = known_fingerprints(place.server.path)
    for home in place.silos:
        others = "".join(f'{silo} = "{key}"\n' for silo, key in known.items() if silo != home.name)
        (home.path / "policy.toml").write_text(POLICY + others)
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Neighbourhood, list[Joining], Path]]:
    folder = tmp_path_factory.mktemp("secure")
    found = founded(folder, five())
    with running(found, lambda _: None) as (_, joined):
        yield found, joined, folder


STEP = ("rounds=2", "local.steps=1", "local.optimizer=sgd", "local.learning_rate=0.5", "sharing.weights=equal")


def test_real_silos_of_two_groups_have_the_decoders_and_label_shares_of_the_simulation(tmp_path: Path) -> None:
    """FissionVAE+L+D, and a DP-CVAE whose label counts go beside its first step, to the last bit."""
    federation = grouped((0,), (0,), (0,), (1,), (1,), (1,))
    configs = {
        "groups": shared_config("fissionvae", SEEDED, *STEP, "method.decoder=group", "method.prior=one-hot"),
        "labels": shared_config("dp_cvae", SEEDED, *STEP, "method.labels=global-dp", "sharing.scopes.encoder=global"),
    }
    found = founded(tmp_path / "real", federation)
    with running(found, lambda _: None):
        for name, config in configs.items():
            run_at(found.server, config, tmp_path / name, lambda _: None)
            assert same(load_checkpoint(tmp_path / name).server, simulated(config, tmp_path / f"{name}-s", federation))


def simulated(config: Config, folder: Path, federation: Federation) -> Tensors:
    return load_checkpoint(Experiment.of(config, federation).run(folder).folder.path).server


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@contextlib.contextmanager
def killing(silo: Joining, journal: Path, due: Callable[[list[dict[str, object]]], bool]) -> Iterator[None]:
    """Kill what has the silo's keys of the sum as soon as the server's journal says that it is due."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            if journal.is_file() and due(read_lines(journal)):
                os.kill(pid(silo.worker), signal.SIGKILL)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_five_real_silos_have_the_integers_of_the_simulation(
    place: tuple[Neighbourhood, list[Joining], Path],
) -> None:
    found, _, folder = place
    config = shared_config("refined_moments", SEEDED)
    run_at(found.server, config, folder / "refined", lambda _: None)
    assert same(load_checkpoint(folder / "refined").server, simulated(config, folder / "simulated", five()))
    rows = RunFolder.open(folder / "refined").egress()
    assert len(rows) == 15
    assert all(row["masked"] and not row["blocks"] for row in rows)


@pytest.mark.parametrize("answered", [0, 2])
def test_a_silo_that_is_killed_has_dropped_out_and_the_others_finish(
    answered: int, place: tuple[Neighbourhood, list[Joining], Path]
) -> None:
    """Before anything of it has come, or once numbers of two silos have: its own are in the sum or not, whole."""
    found, joined, folder = place
    config = shared_config("moments", SEEDED, "rounds=1", f"seed={answered}")
    out, silo = folder / f"killed-{answered}", joined[3]

    def due(rows: list[dict[str, object]]) -> bool:
        return sum(row["event"] == ("answered" if answered else "asked") for row in rows) >= max(answered, 1)

    with killing(silo, out / "silos.jsonl", due):
        run_at(found.server, config, out, lambda _: None)
    came = [row["silo"] for row in RunFolder.open(out).egress()]
    assert set(came) >= {"s0", "s1", "s2", "s4"}
    everyone = five()
    trainer = Experiment.of(config, everyone).trainer
    records = load_checkpoint(out).server["memory/moments/records"].item()
    assert records == sum(len(each) for each in everyone.silos if each.name in came)
    assert trainer.privacy[0].grids["moments"] == trainer.privacy[3].grids["moments"]
    deadline = time.monotonic() + 30
    while silo.worker.process is None or silo.worker.process.poll() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_with_two_of_five_gone_nothing_is_unmasked(place: tuple[Neighbourhood, list[Joining], Path]) -> None:
    found, joined, folder = place
    config, out = shared_config("moments", SEEDED, "rounds=1", "seed=9"), folder / "given-up"
    before = [len(read_accounts(home.path / "ledger.sqlite")[0].events) for home in found.silos]
    for silo in joined[:2]:
        os.kill(pid(silo.worker), signal.SIGSTOP)
    try:
        with (
            shorter(found.server.path / "federation.toml"),
            pytest.raises(FedloomError, match="given up before anything was unmasked: 3 of 5 silos sent keys"),
        ):
            run_at(found.server, config, out, lambda _: None)
    finally:
        for silo in joined[:2]:
            os.kill(pid(silo.worker), signal.SIGCONT)
    assert not RunFolder.open(out).egress()
    assert [len(read_accounts(home.path / "ledger.sqlite")[0].events) for home in found.silos] == before


@contextlib.contextmanager
def shorter(path: Path) -> Iterator[None]:
    """Runs that begin now wait three seconds at a turn."""
    text = path.read_text()
    assert text.count("deadline = 60.0") == 1
    path.write_text(text.replace("deadline = 60.0", "deadline = 3.0"))
    try:
        yield
    finally:
        path.write_text(text)
