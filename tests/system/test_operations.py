"""A federation as a service manager runs it: health and metrics are scraped, processes are killed and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedloom.deployment.demo import Neighbourhood, settle
from fedloom.deployment.processes import free_port
from fedloom.deployment.tail import run_at
from fedloom.engines.remote.rules import RoundRules
from fedloom.federation.building import build_federation
from fedloom.operations.logs import LOG
from fedloom.operations.trail import AUDIT, Trail
from fedloom.runs.files import read_lines
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from places import DP, config_of, private
from support import wait_for

pytestmark = pytest.mark.system
RECOVERY = 10.0  # seconds after a kill


@dataclass
class Service:
    """A command that a service manager keeps running, with health and metrics."""

    command: tuple[str, ...]
    port: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "fedloom", "federation", *self.command, "--health", str(self.port)]
        with (self.folder.parent / f"{self.folder.name}.out").open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    def fetched(self, path: str) -> tuple[int, str]:
        """Code and body; 0 where nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def healthy(self) -> bool:
        return self.fetched("/healthz")[0] == 200

    def metrics(self) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(self.fetched("/metrics")[1])
        return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}

    def child(self, module: str) -> int:
        """The process that carries a module out; behind bubblewrap the innermost."""
        assert self.process is not None
        found = [number for number in descendants(self.process.pid) if runs(number, module)]
        return found[-1]


def descendants(process: int) -> Iterator[int]:
    for number in map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()):
        yield number
        yield from descendants(number)


def runs(process: int, module: str) -> bool:
    words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    return f"fedloom.deployment.{module}".encode() in words


@contextmanager
def operated(place: Neighbourhood, registry: Path) -> Iterator[tuple[Service, list[Service]]]:
    server = Service(("serve", str(place.server.path)), free_port(), place.server.path)
    silos = [
        Service(("join", str(home.path), "--data", str(data)), free_port(), home.path)
        for home, data in zip(place.silos, place.data, strict=True)
    ]
    services = [server, *silos]
    try:
        for service in services:
            service.start()
        for service in services:
            wait_for(service.healthy, f"{service.command} is well", 90)
        yield server, silos
    finally:
        for service in services:
            if service.process is not None:
                service.process.send_signal(signal.SIGTERM)
        for service in services:
            if service.process is not None:
                assert service.process.wait(30) == 0


def test_health_and_metrics_follow_a_federation_through_runs_and_kills(tmp_path: Path, registry: Path) -> None:
    config = config_of("method.name=fedvae", "data.silos=1", *DP, "privacy.epsilon=2.0")
    whole = build_federation(config.data, Streams(config.seed))
    policy = private(8.0, "secure")
    place = settle(tmp_path, replace(whole, silos=whole.silos[:2]), policy, RoundRules(grace=60.0))
    with operated(place, registry) as (server, silos):
        run_at(place.server, config, tmp_path / "run", lambda _: None)
        names = [home.name for home in place.silos]
        shown = server.metrics()
        assert (shown["fedloom_silos_admitted",], shown["fedloom_runs", "finished"]) == (2, 1)
        assert [shown["fedloom_silo_events_total", "answered", name] for name in names] == [2, 2]
        taken = sum(row["bytes"] for row in RunFolder.open(tmp_path / "run").egress())
        assert shown["fedloom_update_bytes_total", "up"] >= taken > 0
        for silo in silos:
            shown = silo.metrics()
            assert shown["fedloom_audit_events_total", "paid"] == shown["fedloom_ledger_charges_total",] == 2
            assert 0 < shown["fedloom_epsilon_spent",] < shown["fedloom_epsilon_granted",] == 8
            events = [each.event for each in Trail(silo.folder / AUDIT).entries()]
            assert events.count("sent") == 3  # two rounds and the statement

        os.kill(server.child("direct.hub_process"), signal.SIGKILL)
        _, body = wait_for(lambda: ill if (ill := server.fetched("/healthz"))[0] == 503 else None, "it shows", 10)
        assert "hub" in json.loads(body)["problems"]["processes"]
        start = time.monotonic()
        wait_for(server.healthy, "the hub is there again", RECOVERY)
        assert time.monotonic() - start < RECOVERY

        silo = silos[0]
        assert silo.process is not None
        os.killpg(silo.process.pid, signal.SIGKILL)  # the whole command; its service manager starts it again
        silo.process.wait()
        wait_for(lambda: silo.fetched("/healthz")[0] == 0, "nobody answers", 10)
        silo.start()
        wait_for(silo.healthy, "the silo is there again", 60)
        run_at(place.server, config, tmp_path / "again", lambda _: None)
        assert silo.metrics()["fedloom_audit_events_total", "paid"] == 4

        for service, data in zip([server, *silos], [None, *place.data], strict=True):
            more = ["--data", str(data)] if data else []
            command = [sys.executable, "-m", "fedloom", "federation", "doctor", str(service.folder), *more]
            found = subprocess.run(command, capture_output=True, text=True, check=False)
            assert found.returncode in (0, 1), found.stdout
            assert "fail" not in found.stdout
            assert "answers with the federation's certificate" in found.stdout
    for service in (server, *silos):
        rows = read_lines(service.folder / "logs" / LOG)
        assert {"started", "stopped"} <= {row["event"] for row in rows}
        assert all({"time", "level", "event", "message"} <= row.keys() for row in rows)
    rows = read_lines(silos[1].folder / "logs" / LOG)
    assert {row["silo"] for row in rows} == {place.silos[1].name}
    assert {row.get("round") for row in rows} >= {1, 2}
