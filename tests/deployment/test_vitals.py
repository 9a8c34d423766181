"""What metrics and health say of a folder, and when they warn of its certificates."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fedloom.config import load_config
from fedloom.deployment import vitals
from fedloom.deployment.charter import Charter
from fedloom.deployment.directories import Invitation, ServerDirectory, ServerSettings, SiloDirectory
from fedloom.deployment.expiry import expiries, warnings_of
from fedloom.deployment.keys import make_server_certificate
from fedloom.deployment.operating import operated
from fedloom.deployment.processes import Child
from fedloom.deployment.status import server_status, silo_status
from fedloom.deployment.submissions import Submission
from fedloom.deployment.vitals import Pulse, Vitals, checks_of
from fedloom.engines.remote.rules import RoundRules
from fedloom.operations.health import problems
from fedloom.operations.logs import LOG
from fedloom.operations.spending import Hold
from fedloom.operations.trail import AUDIT, Trail
from fedloom.runs.files import append_lines, read_lines


@pytest.fixture
def server(tmp_path: Path) -> ServerDirectory:
    silos = {"north": "all", "south": "all"}
    charter = Charter(name="lungs", address="127.0.0.1:8443", silos=silos, shape=(3,))
    return ServerDirectory.create(tmp_path / "server", charter, ServerSettings(), RoundRules())


@pytest.fixture
def silo(server: ServerDirectory) -> SiloDirectory:
    invitation = Invitation.read(server.path / "invitations" / "north.toml")
    return SiloDirectory.create(server.path.parent / "silo", invitation)


def values(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_a_servers_metrics_are_those_of_its_folder(server: ServerDirectory, silo: SiloDirectory) -> None:
    registry = CollectorRegistry()
    registry.register(Vitals(server))
    server.admit(silo.public_key)
    run = Submission.create(server, load_config("demo"), server.path.parent / "run")
    run.folder.mkdir()
    rows = [{"event": "asked", "bytes": 70}, {"event": "answered", "bytes": 50}, {"event": "asked", "bytes": 7}]
    append_lines(run.folder / "silos.jsonl", [{"round": 1, "silo": "north"} | row for row in rows])
    first = values(registry)
    assert first["fedloom_silos_invited",] == 2
    assert first["fedloom_silos_admitted",] == 1
    assert first["fedloom_runs", "under way"] == 1
    assert first["fedloom_audit_events_total", "admitted"] == 1
    assert first["fedloom_silo_events_total", "north", "asked"] == 2
    assert (first["fedloom_update_bytes_total", "down"], first["fedloom_update_bytes_total", "up"]) == (77, 50)
    ends = {each.path.name: each.ends.timestamp() for each in expiries(server.path)}
    assert first["fedloom_certificate_expiry_timestamp_seconds", "server.crt"] == ends["server.crt"]
    assert {name: value for name, value in values(registry).items() if "disk" not in name[0]} == {
        name: value for name, value in first.items() if "disk" not in name[0]
    }  # a line is counted once, however often one looks
    append_lines(run.folder / "silos.jsonl", [{"round": 1, "silo": "south", "event": "refused"}])
    run.end("")
    second = values(registry)
    assert second["fedloom_silo_events_total", "south", "refused"] == 1
    assert (second["fedloom_runs", "under way"], second["fedloom_runs", "finished"]) == (0, 1)


def test_a_silos_metrics_tell_of_its_audit_log_and_hold(silo: SiloDirectory) -> None:
    registry = CollectorRegistry()
    registry.register(Vitals(silo))
    for event in ("asked", "paid", "asked"):
        Trail(silo.path / AUDIT).note(event)  # type: ignore[arg-type]
    found = values(registry)
    assert (found["fedloom_audit_events_total", "asked"], found["fedloom_audit_events_total", "paid"]) == (2, 1)
    assert found["fedloom_restored_unconfirmed",] == 0
    Hold("ticket", "2026-01-01", 0, "0").write(silo.path)
    assert values(registry)["fedloom_restored_unconfirmed",] == 1


def test_a_silo_is_ill_when_something_stands_in_its_way(silo: SiloDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    pulse = Pulse()
    checks = checks_of(silo, pulse)
    assert problems(checks) == {}
    pulse.last -= vitals.STILL + 1
    assert set(problems(checks)) == {"loop"}
    pulse.beat()
    (silo.path / "policy.toml").write_text("methods = 3")
    Hold("ticket", "2026-01-01", 0, "0").write(silo.path)
    monkeypatch.setattr(vitals, "LEAST", 2**70)
    assert set(problems(checks)) == {"policy", "hold", "disk"}


def test_a_server_whose_certificate_has_ended_is_ill(server: ServerDirectory) -> None:
    assert problems(checks_of(server, Pulse())) == {}
    make_server_certificate(server.keys, "127.0.0.1", days=-1)
    assert set(problems(checks_of(server, Pulse()))) == {"certificates"}


@pytest.mark.parametrize(("days", "said"), [(40, False), (29, True), (-1, True)])
def test_expiry_is_told_a_month_before_in_status_and_log(server: ServerDirectory, days: int, said: bool) -> None:
    ends = make_server_certificate(server.keys, "127.0.0.1", days)
    spoken: list[str] = []
    with operated(server, spoken.append, None):
        pass
    levels = [row["level"] for row in read_lines(server.logs / LOG) if row["event"] == "expiry"]
    assert bool(spoken) is bool(levels) is bool(server_status(server)["warnings"]) is said
    if said:
        assert (f"{ends:%Y-%m-%d}" in spoken[0], "fedloom federation renew" in spoken[0]) == (True, True)
        assert levels == ["warning"]


def test_a_silo_is_told_that_the_authority_ends(silo: SiloDirectory) -> None:
    (authority,) = expiries(silo.path)
    assert silo_status(silo)["warnings"] == []
    (said,) = warnings_of(silo.path, authority.ends - timedelta(days=3))
    assert "expires on" in said
    assert "in 3 days; it is the federation's authority: the coordinator founds a new federation" in said


def test_a_loop_beats_and_the_log_has_beginning_and_end(silo: SiloDirectory) -> None:
    with operated(silo, lambda _: None, 0) as operation:
        operation.pulse.last -= 100
        operation.beat()
        assert operation.pulse.problem() == ""
        assert problems(operation.checks) == {"processes": "not started yet"}
        operation.watch([Child("hub", ["true"], silo.logs / "hub.log", {})])
        assert problems(operation.checks) == {"processes": "not running, and started again soon: hub"}
    rows = [json.loads(line) for line in (silo.logs / LOG).read_text().splitlines()]
    assert [row["event"] for row in rows] == ["started", "federation", "stopped"]
    assert {row["silo"] for row in rows} == {"north"}
    assert all(datetime.fromisoformat(row["time"]) <= datetime.now(UTC) for row in rows)
