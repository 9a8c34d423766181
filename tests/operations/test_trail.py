"""The audit log: nothing in it can be changed unseen, and a kill in the middle of a line costs that line alone."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.operations.trail import FIRST, Trail, TrailError


@pytest.fixture
def trail(tmp_path: Path) -> Trail:
    found = Trail(tmp_path / "audit.jsonl")
    for number in (1, 2, 3):
        found.note("asked", {"round": number})
    return found


def test_lines_are_numbered_and_each_holds_the_hash_of_the_one_before(trail: Trail) -> None:
    entries = list(trail.entries())
    assert [(each.number, each.event, each.facts) for each in entries] == [
        (number, "asked", {"round": number}) for number in (1, 2, 3)
    ]
    assert [each.before for each in entries] == [FIRST, entries[0].hash, entries[1].hash]
    assert trail.head() == (3, entries[2].hash)
    assert stat.S_IMODE(trail.path.stat().st_mode) == 0o600


def lines(trail: Trail) -> list[bytes]:
    return trail.path.read_bytes().splitlines(keepends=True)


def test_a_changed_line_shows(trail: Trail) -> None:
    trail.path.write_bytes(trail.path.read_bytes().replace(b'"round":2', b'"round":4'))
    with pytest.raises(TrailError, match="line 2 was changed after it was written"):
        trail.head()


def test_a_line_that_was_taken_out_shows(trail: Trail) -> None:
    first, _, third = lines(trail)
    trail.path.write_bytes(first + third)
    with pytest.raises(TrailError, match="line 2 was changed"):  # it says that it is the third
        trail.head()


def test_a_line_of_another_log_shows(trail: Trail, tmp_path: Path) -> None:
    other = Trail(tmp_path / "other.jsonl")
    for number in (1, 2, 3):
        other.note("asked", {"round": 10 + number})
    trail.path.write_bytes(b"".join([*lines(trail)[:2], lines(other)[2]]))
    with pytest.raises(TrailError, match="line 3 does not follow the one before it"):
        trail.head()


def test_lines_that_were_cut_off_show_beside_one_that_was_noted(trail: Trail) -> None:
    noted = trail.head()
    trail.require(*noted)
    trail.path.write_bytes(b"".join(lines(trail)[:2]))
    assert trail.head()[0] == 2  # by itself it looks whole
    with pytest.raises(TrailError, match="has no line 3 of hash"):
        trail.require(*noted)


@pytest.mark.parametrize("left", [1, 40, -1])
def test_a_line_that_a_kill_cut_short_is_dropped_and_its_number_given_again(trail: Trail, left: int) -> None:
    before = trail.path.read_bytes()
    trail.note("paid", {"round": 9})
    whole = trail.path.read_bytes()[len(before) :]
    trail.path.write_bytes(before + whole[:left])
    assert trail.head()[0] == 3
    trail.note("sent", {"round": 4})
    assert [each.event for each in trail.entries()] == ["asked", "asked", "asked", "sent"]


def test_nothing_is_added_to_a_damaged_log(trail: Trail) -> None:
    trail.path.write_bytes(trail.path.read_bytes().replace(b'"round":3', b'"round":4'))
    before = trail.path.read_bytes()
    with pytest.raises(TrailError, match="its last line was changed"):
        trail.note("asked")
    assert trail.path.read_bytes() == before


@pytest.mark.parametrize("line", [b"{}\n", b"[]\n", b"7\n", b"\n", b'{"hash": 1}\n'])
def test_what_is_no_line_is_said_to_be_none(trail: Trail, line: bytes) -> None:
    trail.path.write_bytes(trail.path.read_bytes() + line)
    with pytest.raises(TrailError, match=r"line 4 (is no line of an audit log|was changed)"):
        trail.head()


WRITER = """
import sys
from pathlib import Path
from fedloom.operations.trail import Trail
for _ in range(20):
    Trail(Path(sys.argv[1])).note("asked", {"from": 0})
"""


def test_processes_that_write_at_once_leave_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) for _ in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert Trail(path).head()[0] == 60


def test_a_line_is_on_one_line_whatever_it_tells_of(trail: Trail) -> None:
    trail.note("refused", {"reason": "a\nb\u2028c"})
    assert json.loads(lines(trail)[3])["facts"]["reason"] == "a\nb\u2028c"
    assert trail.head()[0] == 4


def test_what_is_durable_takes_all_before_it_to_the_disk(trail: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one file, so that a silo that notes three lines waits for the disk once."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    trail.note("asked", durable=False)
    assert synced == []
    trail.note("sent")
    assert synced == [trail.path.stat().st_size]
