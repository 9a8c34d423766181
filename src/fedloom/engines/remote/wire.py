"""The wire as a contract: who is there, order, deliver, answer, withdraw. Rounds know no more of how silos are reached.

A wire promises that

- a silo is known by the name that was admitted, never by what it says;
- to each question comes one answer or one problem, within about its patience; what a wire says of another silo never
  keeps this one's from coming;
- a question that is put again, by this server or by the one that takes its place, is the same question where its bytes
  are: whoever has answered it is not asked to work anew, unless the answer was that it failed;
- an answer is at most as long as its question allows, and whole, bit for bit;
- a question that was withdrawn is answered no more.

``tests/deployment/test_wires.py`` holds every wire to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedloom.engines.remote.frames import Frame

LIMIT = 64 * 2**20  # bytes that an answer may have where nobody says more


@dataclass(frozen=True)
class Question:
    """A frame for a silo; of what kind and what is in it is a matter of those who ask and answer."""

    silo: str
    node: int  # under which number the silo was there when it was asked
    round: int
    frame: Frame
    limit: int = LIMIT  # bytes of the answer's parts


@dataclass(frozen=True)
class Answer:
    """What came of a question: a frame, or a problem on the way."""

    silo: str
    round: int
    seconds: float  # since it was asked
    frame: Frame | None
    problem: str = ""


class Wire(Protocol):
    """Questions to silos, and their answers in the order in which they come."""

    def online(self) -> Mapping[str, int]:
        """The silos that are there now, each with a number that is another once it has been away."""
        ...

    def ask(self, questions: Sequence[Question], patience: float) -> None:
        """Send questions; to each an answer, or a problem, comes within about ``patience`` seconds."""
        ...

    def answer(self, timeout: float) -> Answer | None:
        """The next answer, if one comes in time."""
        ...

    def withdraw(self, silo: str, round: int) -> None:
        """Nobody waits for this silo's answer to its questions of a round any more."""
        ...

    def close(self) -> None:
        """Wait for nobody; what is open is withdrawn, as far as the wire can tell silos so."""
        ...
