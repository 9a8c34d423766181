"""Health and metrics over HTTP, on loopback alone."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from fedloom.errors import FedloomError
from fedloom.operations.health import problems, watched


class Seven(Collector):
    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("seven", "always", value=7)


def fetched(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_follows_the_checks_and_metrics_the_collector() -> None:
    said = {"disk": "", "clock": ""}
    with watched(0, {name: lambda name=name: said[name] for name in said}, Seven()) as port:  # type: ignore[misc]
        assert fetched(port, "/healthz") == (200, json.dumps({"status": "ok", "problems": {}}))
        said["disk"] = "full"
        code, body = fetched(port, "/healthz")
        assert (code, json.loads(body)) == (503, {"status": "unhealthy", "problems": {"disk": "full"}})
        code, body = fetched(port, "/metrics")
        values = {each.name: each.value for family in text_string_to_metric_families(body) for each in family.samples}
        assert (code, values["seven"]) == (200, 7)
        assert values["process_resident_memory_bytes"] > 0
        assert fetched(port, "/etc/passwd")[0] == 404
        assert listening(port) == ["127.0.0.1"]
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1)


def listening(port: int) -> list[str]:
    """The addresses at which this machine takes connections on a port."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, _, at = line.split()[1].rpartition(":")
            if int(at, 16) == port and line.split()[3] == "0A":
                found.append(socket.inet_ntoa(bytes.fromhex(address)[::-1]))
    return found


def test_a_check_that_fails_itself_has_found_something() -> None:
    def broken() -> str:
        raise OSError("gone")

    assert problems({"disk": broken, "loop": lambda: ""}) == {"disk": "OSError: gone"}


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with (
        watched(0, {}, Seven()) as port,
        pytest.raises(FedloomError, match=f"port {port} of 127.0.0.1 cannot be had for health and metrics"),
        watched(port, {}, Seven()),
    ):
        pass
