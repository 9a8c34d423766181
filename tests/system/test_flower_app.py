"""fedloom as an app of a Flower federation that others run: a SuperLink and two SuperNodes, and ``flwr run``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedloom.deployment.charter import Charter
from fedloom.deployment.demo import write_records
from fedloom.deployment.flower.folder import write_app
from fedloom.deployment.hosted.run import HostedRun
from fedloom.deployment.processes import Child, Household, free_port
from fedloom.experiment import train
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from places import POLICY, RULES, config_of
from support import equal_bits, wait_for

pytestmark = pytest.mark.system
BIN = Path(sys.executable).parent
QUIET = {  # nothing is told to anybody, nothing is fetched from anywhere
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}


@dataclass
class Others:
    """A Flower federation on loopback, without keys, whose SuperNodes have silos' folders and records."""

    folder: Path
    federation: Federation
    environment: dict[str, str]

    def run(self, app: Path) -> subprocess.CompletedProcess[str]:
        """What a person types."""
        command = [str(BIN / "flwr"), "run", str(app), "others", "--stream"]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300, check=False)


@contextlib.contextmanager
def standing(folder: Path, federation: Federation) -> Iterator[Others]:
    environment = {**os.environ, **QUIET, "HOME": str(folder), "FLWR_HOME": str(folder / "flwr")}
    environment["PATH"] = f"{BIN}:{environment['PATH']}"
    environment["FEDLOOM_REGISTRY"] = str(folder / "registry")
    port, household = free_port(), Household()
    (folder / "flwr").mkdir(parents=True)
    (folder / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "others"\n[superlink.others]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )

    def start(name: str, *command: str) -> Child:
        return household.add(Child(name, command, folder / f"{name}.log", environment))

    link = (str(BIN / "flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port))
    start("superlink", *link, "--database", str(folder / "flwr" / "state.db"))
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/health"), "the SuperLink answers", 60)
        for silo in federation.silos:
            home, data = folder / silo.name, folder / f"{silo.name}.npz"
            home.mkdir()
            (home / "policy.toml").write_text(POLICY)
            write_records(data, federation, silo.train, federation.test.of_group(silo.groups[0]))
            told = f'silo="{silo.name}" home="{home}" data="{data}"'
            node = (str(BIN / "flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{port}")
            where = ("--host", "127.0.0.1", "--port", str(free_port()))
            start(f"node-{silo.name}", *node, *where, "--node-config", told)
        yield Others(folder, federation, environment)
    finally:
        household.stop()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_in_a_federation_of_others_silos_learn_what_the_reference_engine_learns(tmp_path: Path) -> None:
    config = config_of("method.name=fissionvae", "data.silos=1")
    federation = build_federation(config.data, Streams(config.seed))
    charter = Charter(
        name="theirs",
        silos={silo.name: federation.groups[silo.groups[0]] for silo in federation.silos},
        shape=federation.shape,
        classes=federation.classes,
        records={silo.name: len(silo) for silo in federation.silos},
        wire="flower",
    )
    train(config, tmp_path / "reference", federation)
    write_app(HostedRun(config, charter, RULES, "runs/first"), tmp_path / "app")
    with standing(tmp_path / "others", federation) as others:
        said = others.run(tmp_path / "app")
        run = others.folder / "runs" / "first"
        assert run.is_dir(), said.stdout + said.stderr + (others.folder / "superlink.log").read_text()[-4000:]
        found = RunFolder.open(run)
        assert found.status["state"] == "finished", said.stdout + said.stderr
    ours, theirs = load_checkpoint(run), load_checkpoint(tmp_path / "reference")
    assert ours.round == theirs.round == 2
    assert equal_bits(ours.server, theirs.server)
    assert [row["participants"] for row in found.metrics()] == [[0, 1], [0, 1]]
    assert "token" not in json.dumps(found.environment)
    for silo in federation.silos:
        assert RunFolder.open(next((others.folder / silo.name / "runs").iterdir())).status["state"] == "finished"
