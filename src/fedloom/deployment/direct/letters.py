"""What the two ends say to each other beside bytes: short texts of one form, read with suspicion.

Whatever a peer sends is either one of these, within its bounds, or a :class:`WireError`: nothing else comes of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from fedloom.engines.remote.frames import Frame
from fedloom.errors import FedloomError

TEXT = 2**20  # bytes of a text
NAME = 512  # characters of a part's name
PARTS = 4096  # of one letter
LARGEST = 2**40  # bytes of a part, and of a letter
DIGEST = re.compile(r"[0-9a-f]{64}")


class WireError(FedloomError):
    """What came over the wire is not what its two ends say to each other."""


def text_of(content: Mapping[str, Any]) -> bytes:
    """A text as bytes."""
    found = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    if len(found) > TEXT:
        raise WireError(f"a text has {len(found)} bytes; {TEXT} are allowed")
    return found


def content_of_text(data: bytes, **fields: type) -> dict[str, Any]:
    """The fields of a text: exactly these, each of its type."""
    if len(data) > TEXT:
        raise WireError(f"a text has {len(data)} bytes; {TEXT} are allowed")
    try:
        found = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise WireError("this is no text of the wire") from error
    if not isinstance(found, dict) or set(found) != set(fields):
        raise WireError(f"a text must have the fields {sorted(fields)}")
    for name, kind in fields.items():
        if type(found[name]) is not kind:
            raise WireError(f"'{name}' must be of type {kind.__name__}")
    return found


def digest_in(value: Any) -> str:
    """A digest, which may stand for a file's name."""
    if type(value) is not str or not DIGEST.fullmatch(value):
        raise WireError("a digest must be 64 small hexadecimal digits")
    return value


def size_in(value: Any) -> int:
    """A number of bytes."""
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise WireError("a size must be a whole number of bytes")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(name)


@dataclass(frozen=True)
class Piece:
    """One part of a frame, by what it holds."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Letter:
    """A frame without its bytes: an order, or the answer to it, which has its number and attempt."""

    number: str
    attempt: int
    header: Mapping[str, Any]
    parts: tuple[Piece, ...]
    limit: int = 0  # bytes that the answer to an order may have

    @classmethod
    def order(cls, silo: str, frame: Frame, limit: int) -> Letter:
        """A new order; the same frame for the same silo has the same number, whoever sends it and when."""
        parts = _parts_of(frame)
        named = {"silo": silo, "header": dict(frame.header), "parts": [[p.name, p.sha256] for p in parts]}
        return cls(sha256(text_of(named)).hexdigest(), 1, dict(frame.header), parts, limit)

    def answer(self, frame: Frame) -> Letter:
        """The letter that answers this one."""
        return Letter(self.number, self.attempt, dict(frame.header), _parts_of(frame))

    def again(self) -> Letter:
        """The same order, to be worked at anew."""
        return replace(self, attempt=self.attempt + 1)

    @property
    def size(self) -> int:
        """Bytes of all its parts."""
        return sum(part.size for part in self.parts)

    @property
    def kind(self) -> str:
        """What the frame is."""
        return str(self.header.get("kind", ""))

    def frame(self, bytes_of: Mapping[str, bytes]) -> Frame:
        """The frame, with the bytes of its parts by their digests, which are known to be right."""
        found = Frame(dict(self.header), {part.name: bytes_of[part.sha256] for part in self.parts})
        found.__dict__["digests"] = {part.name: part.sha256 for part in self.parts}
        return found

    def to_bytes(self) -> bytes:
        """As a text."""
        return text_of(
            {
                "number": self.number,
                "attempt": self.attempt,
                "header": dict(self.header),
                "parts": [[part.name, part.sha256, part.size] for part in self.parts],
                "limit": self.limit,
            }
        )

    @classmethod
    def of_bytes(cls, data: bytes) -> Letter:
        """Read back what :meth:`to_bytes` gave."""
        found = content_of_text(data, number=str, attempt=int, header=dict, parts=list, limit=int)
        if found["attempt"] < 1 or len(found["parts"]) > PARTS:
            raise WireError(f"a letter has an attempt from 1 on, and at most {PARTS} parts")
        parts = tuple(map(_part_in, found["parts"]))
        if len({part.name for part in parts}) != len(parts):
            raise WireError("a letter has two parts of one name")
        size_in(sum(part.size for part in parts))
        return cls(digest_in(found["number"]), found["attempt"], found["header"], parts, size_in(found["limit"]))


def _parts_of(frame: Frame) -> tuple[Piece, ...]:
    return tuple(Piece(name, frame.digests[name], len(part)) for name, part in sorted(frame.parts.items()))


def _part_in(value: Any) -> Piece:
    if type(value) is not list or len(value) != 3 or type(value[0]) is not str or not 0 < len(value[0]) <= NAME:
        raise WireError(f"a part is a name of at most {NAME} characters, a digest and a size")
    return Piece(value[0], digest_in(value[1]), size_in(value[2]))


def sizes_of(parts: Iterable[Piece]) -> dict[str, int]:
    """How long what each digest stands for is; two lengths for one digest are a lie."""
    found: dict[str, int] = {}
    for part in parts:
        if found.setdefault(part.sha256, part.size) != part.size:
            raise WireError("a digest stands for parts of two sizes")
    return found
