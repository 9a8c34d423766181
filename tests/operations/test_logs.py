"""Logs as JSON lines, in UTC, in files that do not grow for ever."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedloom.operations.logs import FILES, logged

log = logging.getLogger("fedloom.deployment.node")


def test_a_line_says_when_how_bad_what_who_and_in_which_round(tmp_path: Path) -> None:
    with logged(tmp_path, "north") as path:
        log.warning("round %d is late", 3, extra={"event": "late", "round": 3})
        log.info("connected")
        try:
            raise ValueError("no")
        except ValueError:
            log.exception("failed")
    log.warning("nobody listens any more")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    times = [datetime.fromisoformat(row.pop("time")) for row in rows]
    assert all(abs(datetime.now(UTC) - time) < timedelta(seconds=60) for time in times)
    assert rows[0] == {"level": "warning", "event": "late", "silo": "north", "message": "round 3 is late", "round": 3}
    assert rows[1] == {"level": "info", "event": "deployment.node", "silo": "north", "message": "connected"}
    assert rows[2]["error"].endswith("ValueError: no")
    assert len(rows) == 3


def test_files_are_rotated(tmp_path: Path) -> None:
    with logged(tmp_path, size=1000) as path:
        for number in range(100):
            log.info("line %d", number)
    assert len(list(tmp_path.iterdir())) == FILES + 1
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    assert json.loads(path.read_text().splitlines()[-1])["message"] == "line 99"
