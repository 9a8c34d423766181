"""A federation by its own commands: the demonstration, and every party on a host of its own (network namespaces)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.deployment.demo import write_records
from fedloom.experiment import train
from fedloom.federation.building import build_federation
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from places import METHODS, POLICY, config_of
from support import equal_bits, wait_for

pytestmark = pytest.mark.system
ADDRESS, PORT = "10.77.0.1", 8443
SILOS = {"mnist-0": "mnist", "mnist-1": "mnist", "fashion-mnist-0": "fashion-mnist"}
FEDLOOM = (sys.executable, "-m", "fedloom")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def build(names: dict[str, str]) -> None:
    """Hosts without a cable between any two silos; the server has one address for all of them."""
    for name in names.values():
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    server = names["server"]
    ip("-n", server, "addr", "add", f"{ADDRESS}/32", "dev", "lo")
    for number, silo in enumerate(SILOS, start=1):
        plug, socket, net = f"silo{number}", "server", f"10.77.{number}"
        ip("link", "add", plug, "netns", server, "type", "veth", "peer", "name", socket, "netns", names[silo])
        for host, cable, end in ((server, plug, 1), (names[silo], socket, 2)):
            ip("-n", host, "addr", "add", f"{net}.{end}/24", "dev", cable)
            ip("-n", host, "link", "set", cable, "up")
        ip("-n", names[silo], "route", "add", "default", "via", f"{net}.1")


@pytest.fixture
def hosts() -> Iterator[dict[str, tuple[str, ...]]]:
    """How a command is begun on each host."""
    names = {name: f"fedloom-{os.getpid()}-{name}" for name in ("server", *SILOS)}
    try:
        build(names)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be had here: {getattr(error, 'stderr', '') or error}")
    else:
        yield {name: ("ip", "netns", "exec", space) for name, space in names.items()}
    finally:
        for space in names.values():
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def done(*command: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert found.returncode == 0, found.stderr
    return found.stdout


@contextmanager
def at_work(log: Path, *command: str) -> Iterator[None]:
    """A command that runs until it is told to stop, and then stops in order."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def reaches(host: tuple[str, ...], address: str, port: int) -> bool:
    program = f"import socket; socket.create_connection(({address!r}, {port}), 2).close()"
    return subprocess.run([*host, sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_a_federation_of_hosts_learns_what_the_reference_engine_learns(
    hosts: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    config = config_of(*METHODS["fissionvae-d"])
    whole = build_federation(config.data, Streams(config.seed))
    federation = replace(whole, silos=whole.silos[:3])
    assert [silo.name for silo in federation.silos] == list(SILOS)
    home, run = tmp_path / "lungs", tmp_path / "run"
    silos = ",".join(f"{group}:{silo}" for silo, group in SILOS.items())
    charter = ("--address", f"{ADDRESS}:{PORT}", "--shape", "1,28,28", "--classes", ",".join(federation.classes))
    done(*FEDLOOM, "federation", "init", str(home), "--silos", silos, *charter)
    for silo in federation.silos:
        write_records(tmp_path / f"{silo.name}.npz", federation, silo.train, federation.test.of_group(silo.groups[0]))

    def status() -> list[dict[str, str]]:
        found = done(*hosts["server"], *FEDLOOM, "federation", "status", str(home), "--json")
        return list(json.loads(found)["silos"])

    def all_ask() -> bool:
        return all(silo["key"].startswith("asks: ") for silo in status())

    def all_there() -> bool:
        return [silo["there"] for silo in status()] == ["online"] * 3

    with ExitStack() as stack:
        serve = (*FEDLOOM, "federation", "serve", str(home))
        stack.enter_context(at_work(tmp_path / "serve.log", *hosts["server"], *serve))
        for silo in SILOS:
            own, invitation = tmp_path / silo, home / "invitations" / f"{silo}.toml"
            join = (*FEDLOOM, "federation", "join", str(invitation), "--data", str(own) + ".npz", "--out", str(own))
            stack.enter_context(at_work(tmp_path / f"{silo}.log", *hosts[silo], *join))
        wait_for(all_ask, "all silos ask to be admitted")
        for silo in SILOS:
            (tmp_path / silo / "policy.toml").write_text(POLICY)
        done(*hosts["server"], *FEDLOOM, "federation", "admit", str(home), "--yes")
        wait_for(all_there, "all silos are there")
        said = [(tmp_path / f"{silo}.log").read_text() for silo in SILOS]
        assert all("waiting to be admitted: tell the coordinator this key by another way" in text for text in said)
        wait_for(lambda: f"is connected with {ADDRESS}:{PORT}" in (tmp_path / "mnist-0.log").read_text(), "it says so")
        assert reaches(hosts["mnist-0"], ADDRESS, PORT)
        (tmp_path / "experiment.toml").write_text(config.to_toml())
        command = ("run", str(tmp_path / "experiment.toml"), "--federation", str(home))
        done(*hosts["server"], *FEDLOOM, *command, "--out", str(run))
    train(config, tmp_path / "reference", federation)
    assert equal_bits(load_checkpoint(run).server, load_checkpoint(tmp_path / "reference").server)


def commands() -> Iterator[bytes]:
    """Of all processes; one may be gone before it is looked at."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield path.read_bytes()


def test_the_demonstration_leaves_folders_and_no_process(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    done(*FEDLOOM, "federation", "demo", "--out", str(out), "--rounds", "1")
    assert RunFolder.open(out / "run").status["state"] == "finished"
    for silo in ("mnist-0", "fashion-mnist-0"):
        (own,) = (out / silo / "runs").iterdir()
        assert RunFolder.open(own).status["state"] == "finished"
    assert not [command for command in commands() if str(out).encode() in command]
