"""The logs of other processes, in one file of JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedloom.operations.logs import logged
from fedloom.operations.relay import Relay

WRITER = """
import logging
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
logging.info("round 7: update after 0.1 seconds")
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("failed")
logging.info("ready")
"""


def write(path: Path, program: str = WRITER) -> None:
    with path.open("ab") as log:
        subprocess.run([sys.executable, "-c", program], stderr=log, check=True)


def test_lines_of_another_process_keep_their_time_level_and_round(tmp_path: Path) -> None:
    source = tmp_path / "worker.log"
    source.write_text("2020-01-01 00:00:00,000 INFO from an earlier life\n")
    relay = Relay("worker", source, source.stat().st_size)
    write(source)
    with logged(tmp_path, "north") as path:
        assert relay.pass_on() is False
        relay.pass_on()  # nothing is told twice
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(datetime.now(UTC) - datetime.fromisoformat(row["time"]) < timedelta(seconds=60) for row in rows)
    words = source.read_text().splitlines()[1:]
    local = datetime.strptime(words[0][:23], "%Y-%m-%d %H:%M:%S,%f").astimezone(UTC)
    assert rows[0]["time"] == local.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    told = [(row["level"], row["message"], row.get("round")) for row in rows]
    assert told[0] == ("info", "round 7: update after 0.1 seconds", 7)
    assert told[1] == ("error", "failed", None)
    assert ("error", "ZeroDivisionError: division by zero", None) in told  # its traceback has its level
    assert told[-1] == ("info", "ready", None)
    assert {(row["event"], row["silo"]) for row in rows} == {("worker", "north")}


def test_a_log_that_has_grown_long_is_begun_anew(tmp_path: Path) -> None:
    source = tmp_path / "worker.log"
    with source.open("ab") as writer, logged(tmp_path) as path:
        relay = Relay("worker", source, size=100)
        writer.write(b"x" * 120 + b"\n")
        writer.flush()
        assert relay.pass_on() is True
        assert (source.stat().st_size, (tmp_path / "worker.log.1").stat().st_size) == (0, 121)
        writer.write(b"after\n")
        writer.flush()
        assert relay.pass_on() is False
        assert source.read_bytes() == b"after\n"
    assert json.loads(path.read_text().splitlines()[-1])["message"] == "after"
