"""A secure sum's messages as frames. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fedloom
from fedloom.engines.remote.frames import Frame
from fedloom.errors import FedloomError
from fedloom.secure.terms import PREFIX, Parts, Turn

SECURE = "secure"
SIGNATURE = "signature"  # a part of two answers: the words at the worker, signed where the key is


@dataclass(frozen=True)
class Asked:
    """Which turn of which attempt at which round's sum; the first one brings the whole order."""

    run: str
    round: int
    attempt: str
    turn: Turn

    def frame(self, parts: Mapping[str, bytes], order: Mapping[str, Any] | None = None) -> Frame:
        """With what the silo is asked; ``order`` is a task's header, with the silos' registered keys."""
        own = {
            "kind": SECURE,
            "version": fedloom.__version__,
            "run": self.run,
            "round": self.round,
            "attempt": self.attempt,
            "turn": str(self.turn),
        }
        return Frame({**(order or {}), **own}, dict(parts))

    @classmethod
    def of(cls, frame: Frame) -> Asked:
        """Read a question's header."""
        header = frame.header
        try:
            return cls(str(header["run"]), int(header["round"]), str(header["attempt"]), Turn(header["turn"]))
        except (KeyError, ValueError, TypeError) as error:
            raise FedloomError(f"this is no question of a secure sum: {error}") from error

    def answered(self, parts: Parts) -> Frame:
        """A silo's answer."""
        return Frame({"kind": SECURE, "round": self.round, "attempt": self.attempt, "turn": str(self.turn)}, parts)

    def parts_in(self, frame: Frame) -> Parts | None:
        """What an answer to this very question brings; nothing where it answers another one."""
        asked = (frame.header.get("round"), frame.header.get("attempt"), frame.header.get("turn"))
        return dict(frame.parts) if asked == (self.round, self.attempt, str(self.turn)) else None


def words_to_sign(frame: Frame) -> bytes:
    """What a worker's answer wants signed with the silo's key; empty where there is nothing."""
    words = frame.parts.get(SIGNATURE, b"") if frame.kind == SECURE else b""
    if words and not words.startswith(PREFIX):
        raise FedloomError("the worker wants words signed that belong to no secure sum")
    return words


def signed(frame: Frame, signature: bytes) -> Frame:
    """The answer with the signature in the place of the words."""
    return Frame(frame.header, {**frame.parts, SIGNATURE: signature})
