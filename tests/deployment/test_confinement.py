"""What a confined process can still do, tried from inside."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.deployment import confinement
from fedloom.deployment.confinement import Rights, bubblewrap, confined

needed = pytest.mark.skipif(not bubblewrap(), reason="bubblewrap is not installed, or not allowed here")
ATTEMPTS = """
import json, os, pathlib, socket, sys
home, data = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
def tried(attempt):
    try:
        return attempt() or "done"
    except OSError as error:
        return type(error).__name__
def replaced():
    (home / "new").write_text("agrees to all")
    (home / "new").replace(home / "policy.toml")
print(json.dumps({
    "ledger": tried(lambda: (home / "ledger.sqlite").write_text("spent") and None),
    "policy": tried(lambda: (home / "policy.toml").write_text("agrees to all") and None),
    "replace": tried(replaced),
    "key": tried(lambda: (home / "node.key").read_text()),
    "records": tried(lambda: data.read_text()),
    "elsewhere": tried(lambda: (home.parent / "elsewhere").write_text("x") and None),
    "network": tried(lambda: socket.create_connection(("127.0.0.1", int(sys.argv[3])), 2).close()),
    "capabilities": int(pathlib.Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]) < 5,
}))
"""


def attempts(tmp_path: Path, rights: Rights, port: int) -> dict[str, object]:
    command = [sys.executable, "-c", ATTEMPTS, str(tmp_path / "home"), str(tmp_path / "data"), str(port)]
    done = subprocess.run(confined(command, rights), capture_output=True, text=True, check=True, timeout=60)
    return dict(json.loads(done.stdout))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    found = tmp_path / "home"
    found.mkdir()
    (found / "policy.toml").write_text("agrees to nothing")
    (found / "node.key").write_text("secret")
    (tmp_path / "data").write_text("records")
    return found


@needed
def test_a_worker_writes_its_ledger_and_can_do_nothing_else(home: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        rights = Rights(writes=(home,), only_reads=(home / "policy.toml",), never_sees=(home / "node.key",))
        assert attempts(tmp_path, rights, port) == {
            "ledger": "done",
            "policy": "OSError",
            "replace": "OSError",
            "key": "PermissionError",
            "records": "records",
            "elsewhere": "OSError",
            "network": "ConnectionRefusedError",
            "capabilities": 0,
            "processes": True,
        }
    assert (home / "policy.toml").read_text() == "agrees to nothing"
    assert (home / "ledger.sqlite").read_text() == "spent"


@needed
def test_a_node_reaches_the_server_and_sees_no_record(home: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = attempts(tmp_path, Rights(never_sees=(tmp_path / "data",), network=True), server.getsockname()[1])
    assert found["records"] == "PermissionError"
    assert found["key"] == "secret"
    assert found["network"] == "done"
    assert found["ledger"] == found["policy"] == "OSError"


def test_without_bubblewrap_a_command_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "bubblewrap", lambda: "")
    assert confined(["a", "b"], Rights()) == ["a", "b"]
