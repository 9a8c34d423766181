"""The server's audit log: what was handed in, asked and answered, and who was let in or sent away."""

from __future__ import annotations

from pathlib import Path

from fedloom.config import load_config
from fedloom.deployment.charter import Charter
from fedloom.deployment.directories import Invitation, ServerDirectory, ServerSettings, SiloDirectory
from fedloom.deployment.performing import note
from fedloom.deployment.submissions import Submission
from fedloom.engines.remote.rounds import Event
from fedloom.engines.remote.rules import RoundRules
from fedloom.operations.trail import AUDIT, Trail
from fedloom.runs.files import read_lines


def test_the_servers_audit_log_tells_of_admissions_runs_and_answers(tmp_path: Path) -> None:
    charter = Charter(name="lungs", address="127.0.0.1:8443", silos={"north": "all"}, shape=(3,))
    home = ServerDirectory.create(tmp_path / "server", charter, ServerSettings(), RoundRules())
    silo = SiloDirectory.create(tmp_path / "north", Invitation.read(home.path / "invitations" / "north.toml"))
    _, key = home.admit(silo.public_key)
    config = load_config("demo")
    submission = Submission.create(home, config, tmp_path / "run")
    submission.folder.mkdir()
    for event in (Event(1, "north", "asked", bytes=70), Event(1, "north", "late", "in round 2")):
        note(Trail(home.path / AUDIT), submission, event)
    home.renew()
    home.revoke("north")
    found = [(each.event, dict(each.facts)) for each in Trail(home.path / AUDIT).entries()]
    handed = {"run": submission.run, "folder": str(submission.folder), "experiment": config.digest()}
    asked = {"run": submission.run, "round": 1, "silo": "north", "event": "asked", "bytes": 70}
    until = found[3][1]
    assert found == [
        ("admitted", {"silo": "north", "key": key}),
        ("handed in", handed),
        ("asked", asked),
        ("renewed", until),
        ("taken back", {"silo": "north"}),
    ]
    assert [row["event"] for row in read_lines(submission.folder / "silos.jsonl")] == ["asked", "late"]
