"""Whole runs on ranks: the same as alone, however many there are, and wherever their number changes on the way."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import typer
from torch.distributed.launcher.api import LaunchConfig

import fedloom
from engines.one_answer import PRIVATE
from engines.ranks_here import led, threads
from fedloom.cli.ranks import LOOPBACK, VARIABLES, launch, loopback_store
from fedloom.config import Config
from fedloom.engines import ranks
from fedloom.engines.base import RoundReport
from fedloom.engines.ranks import LEADER, joined, place
from fedloom.engines.remote.frames import Frame
from fedloom.errors import ConfigError, FedloomError
from fedloom.experiment import Observer, on_ranks, train
from fedloom.experiment.on_ranks import HERE, Leader
from fedloom.federation.records import Federation
from support import assert_same_run, tiny_config

# Everything that a silo can keep from round to round, and silos that sit out a round.
KEEPING = ("rounds=4", "participation.rate=0.7", "local.keep_optimizer=true", "sharing.scopes.encoder=silo")
NOISE = (*PRIVATE, "privacy.noise=test")
FOUND = ("data.silos=3", "data.groups=discover", "discovery.groups=2", "method.name=fissionvae")


class Stopped(Exception):
    """Somebody has."""


class Stopping(Observer):
    """Stops a run when a round is done."""

    def __init__(self, round: int) -> None:
        self._round = round

    def round_done(self, report: RoundReport, metrics: dict[str, float]) -> None:
        if report.context.round == self._round:
            raise Stopped


@pytest.mark.parametrize(("engine", "private"), [("reference", NOISE), ("fused", ())], ids=["dp, reference", "fused"])
def test_a_run_goes_on_with_other_ranks_as_if_nothing_had_happened(
    engine: str, private: tuple[str, ...], tmp_path: Path
) -> None:
    """From 2 to 3 ranks, and to one; what silos keep is in the checkpoints, wherever it lay."""
    tree = tiny_config(*KEEPING, *private, f"engine.name={engine}", "engine.checkpoint_every=2")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tree, whole)
    with led(2) as leader, pytest.raises(Stopped):
        leader.train(tree, parts, Stopping(2))
    with led(3) as leader, pytest.raises(Stopped):
        leader.resume(parts, Stopping(3))  # whose round is not kept
    with led(1) as leader:
        leader.resume(parts, Observer())
    assert_same_run(parts, whole)


def test_silos_whose_groups_are_found_train_on_ranks(tmp_path: Path) -> None:
    tree = tiny_config(*FOUND)
    train(tree, tmp_path / "alone")
    with led(3) as leader:
        leader.train(tree, tmp_path / "together", Observer())
    assert_same_run(tmp_path / "together", tmp_path / "alone")


def test_ranks_that_were_started_again_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launcher does when one of them has failed; what lies there must be this run."""
    tree = tiny_config("rounds=3")
    train(tree, tmp_path / "alone")
    with led(2) as leader, pytest.raises(Stopped):
        leader.train(tree, tmp_path / "run", Stopping(2))
    with led(2) as leader, pytest.raises(FedloomError, match="exists already"):
        leader.train(tree, tmp_path / "run", Observer())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with led(2) as leader, pytest.raises(FedloomError, match="exists already"):
        leader.train(tiny_config("rounds=2"), tmp_path / "run", Observer())
    with led(2) as leader:
        leader.train(tree, tmp_path / "run", Observer())
    assert_same_run(tmp_path / "run", tmp_path / "alone")


def test_a_run_that_diverges_on_a_rank_diverges(tmp_path: Path) -> None:
    for engine in ("reference", "fused"):
        tree = tiny_config("local.optimizer=sgd", "local.learning_rate=1e30", f"engine.name={engine}")
        with led(4) as leader:
            run = leader.train(tree, tmp_path / engine, Observer())
        assert run.folder.status["state"] == "diverged"


# What people get wrong


def refusal(tmp_path: Path, given: Config | None = None) -> str:
    """Of a run on two ranks, which leaves nothing behind."""
    with led(2, lambda _: given) as leader, pytest.raises(FedloomError) as refused:
        leader.train(tiny_config(), tmp_path / "run", Observer())
    assert not (tmp_path / "run").exists()
    return str(refused.value)


def test_ranks_that_were_given_other_settings_are_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, tiny_config("local.batch_size=17"))
    assert said == ("rank 1 was given another configuration than rank 0: local.batch_size is 17 there and 16 here")


def test_ranks_of_another_version_are_refused(tmp_path: Path) -> None:
    """Before anything else of what they say is looked at."""
    leader, other = threads(2)
    other.tell(LEADER, Frame({"kind": HERE, "version": "0.0.1", "config": "= no longer read"}))
    with pytest.raises(FedloomError) as refused:
        Leader(leader).train(tiny_config(), tmp_path / "run", Observer())
    here = f"rank 0 {fedloom.__version__}"
    assert str(refused.value) == f"rank 1 runs fedloom 0.0.1, and {here}; install one version everywhere"


def test_ranks_that_read_other_records_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = itertools.count()
    monkeypatch.setattr(Federation, "digest", property(lambda _: str(next(digests))))
    assert refusal(tmp_path) == "rank 1 has read other records than rank 0; give every machine the same data"


def test_ranks_that_train_on_other_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose bits are others, and whose noise."""
    devices = itertools.count()
    monkeypatch.setattr(on_ranks, "gpu_of", lambda _: {"gpu": f"GPU {next(devices)}"})
    assert refusal(tmp_path) == "rank 1 trains on GPU 0, and rank 0 on GPU 1; give all the same"


def test_what_a_rank_cannot_read_is_said_as_its_own(tmp_path: Path) -> None:
    def missing(_: int) -> Config | None:
        raise ConfigError("there is no file here")

    with led(2, missing) as leader, pytest.raises(FedloomError, match=r"^rank 1: there is no file here$"):
        leader.train(tiny_config(), tmp_path / "run", Observer())


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ConfigError, match=rf"^port 127\.0\.0\.1:{port} is in use; take another one"):
            joined()


def test_ranks_that_count_their_starts_otherwise_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one machine's launcher started its ranks again before another's saw that anybody had died."""
    monkeypatch.setattr(ranks, "ARRIVAL", timedelta(seconds=0.5))
    store = loopback_store()
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with ThreadPoolExecutor(2) as pool:
        coming = [
            pool.submit(joined, {**common, "RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(rank)})
            for rank in range(2)
        ]
        for rank in coming:
            with pytest.raises(FedloomError, match=r"^the ranks did not find each other at 127\.0\.0\.1:"):
                rank.result(30)


def test_what_goes_wrong_while_ranks_talk_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory for a frame is no lost rank; and nobody waits for a thread that has ended."""

    def full(*_: object) -> None:
        raise MemoryError

    came: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def told() -> None:
        try:
            ranks.TorchRanks(0, 2).tell(1, Frame({"kind": HERE}))
        except MemoryError as error:
            came.put(error)

    monkeypatch.setattr(ranks.dist, "send", full)
    threading.Thread(target=told, daemon=True).start()
    assert isinstance(came.get(timeout=10), MemoryError)


def test_ranks_of_one_machine_listen_to_nobody_else() -> None:
    """127.0.0.2 is this machine, too: a store that listened on all networks would be there."""
    store = loopback_store()
    socket.create_connection(("127.0.0.1", store.port), timeout=5).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)


def test_ranks_of_one_machine_meet_where_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the store above, which the launcher takes for its own."""
    found: list[LaunchConfig] = []

    def launched(config: LaunchConfig, _: str) -> Callable[..., None]:
        found.append(config)
        return lambda *_: None

    monkeypatch.setattr(torch.distributed.launcher.api, "elastic_launch", launched)
    monkeypatch.setattr(logging, "disable", lambda: None)
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(typer.Exit):
        launch(["run", "demo"], 2)
    (config,) = found
    assert (config.rdzv_backend, config.max_restarts) == ("static", 0)
    assert os.environ["GLOO_SOCKET_IFNAME"] in LOOPBACK


def test_ranks_start_no_ranks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict.fromkeys(VARIABLES, "1"))
    with pytest.raises(ConfigError, match=r"^--ranks starts processes, but a launcher has started this one already"):
        launch(["run", "demo"], 2)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"^2 ranks on this machine need a GPU each, and it has 1; start so many"):
        place({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
