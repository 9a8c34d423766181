"""What crosses a process: a header of plain values and named parts of bytes, as one block of bytes.

Nothing here needs torch: the process that Flower starts for every message only passes frames on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

from fedloom.errors import FedloomError

MAGIC = b"fedloom1"
STATE, STATEMENT = "state", "statement"  # the question what a run cost, and its answer
_LENGTH = 8


@dataclass(frozen=True)
class Frame:
    """A message between server and silo, before it is put into any envelope."""

    header: Mapping[str, Any]
    parts: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What it is: a task, an update, a refusal or a failure."""
        return str(self.header.get("kind", ""))

    @property
    def size(self) -> int:
        """The bytes of its parts."""
        return sum(map(len, self.parts.values()))

    @cached_property
    def digests(self) -> dict[str, str]:
        """Of each part: by it a part is named, kept and sent once."""
        return {name: sha256(part).hexdigest() for name, part in self.parts.items()}

    @property
    def sha256(self) -> str:
        """A digest of all parts, with their names; no byte of a part is looked at twice for it."""
        found = sha256()
        for name, part in sorted(self.parts.items()):
            found.update(f"{name}/{len(part)}/{self.digests[name]}/".encode())
        return found.hexdigest()

    def pieces(self) -> list[bytes]:
        """What follows each other in one block: a head, and the parts in the order of their names."""
        names = sorted(self.parts)
        index = {"header": dict(self.header), "parts": [[name, len(self.parts[name])] for name in names]}
        text = json.dumps(index).encode()
        return [MAGIC, len(text).to_bytes(_LENGTH, "big"), text, *(self.parts[name] for name in names)]

    def to_bytes(self) -> bytes:
        """One block."""
        return b"".join(self.pieces())

    @classmethod
    def of_bytes(cls, data: bytes) -> Frame:
        """Read back what :meth:`to_bytes` gave; anything else is refused."""
        start = len(MAGIC) + _LENGTH
        try:
            if data[: len(MAGIC)] != MAGIC:
                raise ValueError("it does not begin as one")
            end = start + int.from_bytes(data[len(MAGIC) : start], "big")
            index = json.loads(data[start:end])
            parts = {}
            for name, length in index["parts"]:
                if not isinstance(name, str) or name in parts or type(length) is not int or length < 0:
                    raise ValueError("its parts are not told apart")
                parts[name] = data[end : end + length]
                end += length
            if end != len(data):
                raise ValueError(f"it has {len(data)} bytes instead of {end}")
            return cls(dict(index["header"]), parts)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FedloomError(f"this is no whole frame: {error}") from error
