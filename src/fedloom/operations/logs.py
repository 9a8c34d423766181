"""Logs as JSON lines, with time in UTC and rotation, for whatever collects them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

LOG = "events.jsonl"  # its name in a folder of logs
BYTES, FILES = 10 * 2**20, 5  # of one file; how many older ones are kept
FIELDS = ("event", "silo", "round")  # what a record may carry beside its text


class JsonLines(logging.Formatter):
    """A record as one line: time, level, event, silo, round, message, and where an error came from."""

    def __init__(self, silo: str = "") -> None:
        super().__init__()
        self._silo = silo

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        words: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.name.removeprefix("fedloom."),
            "silo": self._silo,
            "message": record.getMessage(),
        }
        words |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            words["error"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in words.items() if value != ""}, default=str)


@contextmanager
def logged(folder: Path, silo: str = "", *, size: int = BYTES) -> Iterator[Path]:
    """All that this process has to say goes into a file of the folder, too, until the block ends."""
    path = folder / LOG
    handler = RotatingFileHandler(path, maxBytes=size, backupCount=FILES, encoding="utf-8")
    handler.setFormatter(JsonLines(silo))
    root = logging.getLogger("fedloom")
    before = root.level
    root.addHandler(handler)
    root.setLevel(min(before or logging.INFO, logging.INFO))
    try:
        yield path
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()
