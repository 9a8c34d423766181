"""What other processes write into their logs, as lines of this one's: one file of JSON lines for a server or a silo."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fedloom.operations.logs import BYTES

LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
ROUND = re.compile(r"\bround (\d+)\b")


@dataclass
class Relay:
    """Reads a log that somebody else writes, line by line, and keeps it from growing for ever."""

    name: str
    path: Path
    seen: int = 0  # bytes that were told before
    size: int = BYTES
    _level: int = logging.INFO

    def pass_on(self) -> bool:
        """Log what is new; whether the file was begun anew, because it had grown too long."""
        if not self.path.is_file():
            return False
        log = logging.getLogger(f"fedloom.{self.name}")
        for record in self._records(log):
            log.handle(record)
        if self.seen < self.size:
            return False
        shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.1"))
        with self.path.open("r+b") as file:
            file.truncate()  # its writer appends, so goes on at the beginning
        self.seen = 0
        return True

    def _records(self, log: logging.Logger) -> Iterator[logging.LogRecord]:
        with self.path.open("rb") as file:
            file.seek(min(self.seen, self.path.stat().st_size))
            text, newline, _ = file.read().rpartition(b"\n")
        self.seen += len(text + newline)
        for line in text.decode(errors="replace").splitlines():
            if not line.strip():
                continue
            match = LINE.fullmatch(line)
            self._level = getattr(logging, match[2]) if match else self._level
            message = match[3] if match else line
            record = log.makeRecord(log.name, self._level, "", 0, message, (), None, extra={"event": self.name})
            if match:
                record.created = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                record.msecs = float(match[1][-3:])
            if number := ROUND.search(message):
                record.__dict__["round"] = int(number[1])
            yield record
