"""The audit log: what was asked, approved, refused, paid and sent, in lines that each hold a hash of the one before.

At a silo all lines are on disk before anything leaves, and a payment before what it pays for is made. None can be
changed, dropped or put between others unseen; that the last ones were cut off, or that all was written anew, shows
beside a number and hash that were noted elsewhere.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal

from fedloom.errors import FedloomError
from fedloom.runs.files import explained

AUDIT = "audit.jsonl"  # its name in a folder
FIRST = "0" * 64  # what the first line holds in place of a hash
SHORT, LONGEST = 4_000, 60_000  # characters of most lines, and of any
NOTHING: Mapping[str, Any] = MappingProxyType({})

Deed = Literal[
    "asked",
    "approved",
    "refused",
    "paid",
    "sent",
    "failed",
    "handed in",
    "answered",
    "rejected",
    "admitted",
    "taken back",
    "renewed",
    "restored",
    "confirmed",
]


class TrailError(FedloomError):
    """An audit log that was changed, or that is not the one that it is taken for."""

    page = "how-to/operate.md"


@dataclass(frozen=True)
class Entry:
    """A line."""

    number: int  # the first is 1
    time: str
    event: str
    facts: Mapping[str, Any]
    before: str  # the hash of the line before
    hash: str


def now() -> str:
    """The time as logs have it: UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Trail:
    """The audit log at a path; several processes may write to it."""

    path: Path

    def note(self, event: Deed, facts: Mapping[str, Any] = NOTHING, *, durable: bool = True) -> Entry:
        """Add a line, which no kill takes back, and if it is durable no power cut either."""
        with explained(self.path), open(self.path, "ab+", opener=_for_its_owner) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            last = self._last(file)
            words = {"number": (last.number if last else 0) + 1, "time": now(), "event": event}
            words |= {"facts": dict(facts), "before": last.hash if last else FIRST}
            line = _canonical({**words, "hash": _hash(words)})
            if len(line) > LONGEST:
                raise TrailError(f"{self.path}: a line of {len(line)} characters is too long for an audit log")
            file.write(line + b"\n")
            file.flush()
            if durable:
                os.fsync(file.fileno())
        return _entry(json.loads(line))

    def entries(self) -> Iterator[Entry]:
        """All of them, each checked against the one before; a last line that a kill cut short was never relied upon."""
        before, number = FIRST, 0
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                number += 1
                entry = self._checked(line, number)
                if entry.before != before:
                    raise TrailError(f"{self.path}: line {number} does not follow the one before it")
                before = entry.hash
                yield entry

    def head(self) -> tuple[int, str]:
        """The last line's number and hash, to be noted elsewhere; all before it is checked."""
        found = (0, FIRST)
        for entry in self.entries():
            found = (entry.number, entry.hash)
        return found

    def require(self, number: int, hash: str) -> None:
        """Refuse a log that does not go on from a line that was noted elsewhere."""
        if (number, hash) == (0, FIRST):
            return
        if not any((entry.number, entry.hash) == (number, hash) for entry in self.entries()):
            raise TrailError(f"{self.path} has no line {number} of hash {hash}: lines were cut off, or written anew")

    def _last(self, file: IO[bytes]) -> Entry | None:
        """The last whole line; what a kill left of another one behind it is dropped."""
        end = file.seek(0, os.SEEK_END)
        for reach in (SHORT, 2 * LONGEST):
            file.seek(max(0, end - reach))
            whole, newline, torn = file.read().rpartition(b"\n")
            if b"\n" in whole:
                break
        if torn:
            file.truncate(end - len(torn))
        if not newline:
            return None
        line = whole.rpartition(b"\n")[2]
        return self._checked(line, None)

    def _checked(self, line: bytes, number: int | None) -> Entry:
        """A line by itself, of this number if one is told."""
        at = "its last line" if number is None else f"line {number}"
        try:
            words = json.loads(line)
            hash = words.pop("hash")
            true = _hash(words) == hash and (number is None or words["number"] == number)
            entry = _entry({**words, "hash": hash})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TrailError(f"{self.path}: {at} is no line of an audit log") from error
        if not true:
            raise TrailError(f"{self.path}: {at} was changed after it was written")
        return entry


def _canonical(words: Mapping[str, Any]) -> bytes:
    return json.dumps(words, sort_keys=True, separators=(",", ":")).encode()


def _hash(words: Mapping[str, Any]) -> str:
    return sha256(_canonical(words)).hexdigest()


def _entry(words: Mapping[str, Any]) -> Entry:
    names = ("number", "time", "event", "facts", "before", "hash")
    return Entry(*(words[name] for name in names))


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
