"""A Flower federation of processes on loopback, as others run it: fedloom's app is one among its apps."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedloom.deployment.demo import write_records
from fedloom.deployment.processes import Child, Household, free_port
from fedloom.federation.records import Federation
from support import wait_for

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
    environment: dict[str, str]
    nodes: Sequence[Child]

    def run(self, app: Path) -> subprocess.CompletedProcess[str]:
        """What a person types."""
        command = [str(BIN / "flwr"), "run", str(app), "others", "--stream"]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=600, check=False)


@contextlib.contextmanager
def standing(folder: Path, federation: Federation, policy: str) -> Iterator[Others]:
    """Such a federation until the block ends, with this policy at every silo."""
    environment = {**os.environ, **QUIET, "HOME": str(folder), "FLWR_HOME": str(folder / "flwr")}
    environment["PATH"] = f"{BIN}:{environment['PATH']}"
    environment["FEDLOOM_REGISTRY"] = str(folder / "registry")
    port, household, nodes = free_port(), Household(), list[Child]()
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
            (home / "policy.toml").write_text(policy)
            write_records(data, federation, silo.train, federation.test.of_group(silo.groups[0]))
            told = f'silo="{silo.name}" home="{home}" data="{data}"'
            node = (str(BIN / "flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{port}")
            where = ("--host", "127.0.0.1", "--port", str(free_port()))
            nodes.append(start(f"node-{silo.name}", *node, *where, "--node-config", told))
        yield Others(folder, environment, nodes)
    finally:
        household.stop()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
