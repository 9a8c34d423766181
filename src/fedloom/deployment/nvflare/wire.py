"""The contract kept through a job's tasks: one task for each question, given to the one site that it is for."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.inbox import Inbox
from fedloom.engines.remote.wire import Answer, Question

TICK = 0.1  # seconds between two looks for questions whose patience is over
Came = Callable[[Frame | None, str], None]  # an answer, or the problem in place of one; from any thread


class Sites(Protocol):
    """What is used of NVFlare's server."""

    def present(self) -> Mapping[str, int]:
        """The job's sites that are not known to be gone, each with a number that is another once it was."""
        ...

    def assign(self, site: str, frame: Frame, came: Came) -> Callable[[], None]:
        """Give a site a task; returns how to take it back, after which ``came`` may still be called."""
        ...


@dataclass(eq=False)
class _Assigned:
    """A question that waits for its answer."""

    question: Question
    start: float
    patience: float
    cancel: Callable[[], None] = lambda: None


class NVFlareWire:
    """Sites by the names of silos; NVFlare vouches for them by their certificates."""

    def __init__(self, sites: Sites, silos: Container[str]) -> None:
        self._sites, self._silos = sites, silos
        self._inbox = Inbox()
        self._waiting: dict[int, _Assigned] = {}  # whoever takes one out of it says what came of it

    def online(self) -> dict[str, int]:
        """The sites of silos that are there."""
        return {site: number for site, number in self._sites.present().items() if site in self._silos}

    def ask(self, questions: Sequence[Question], patience: float) -> None:
        """A task for each; a site takes them one after the other."""
        self._inbox.expect(questions)
        for question in questions:
            assigned = _Assigned(question, time.monotonic(), patience)
            self._waiting[id(assigned)] = assigned
            assigned.cancel = self._sites.assign(question.silo, question.frame, self._came(assigned))

    def answer(self, timeout: float) -> Answer | None:
        """The next answer, or the problem that one has not come."""
        end = time.monotonic() + timeout
        while True:
            self._give_up()
            if found := self._inbox.next(min(TICK, max(0.0, end - time.monotonic()))):
                return found
            if time.monotonic() >= end:
                return None

    def withdraw(self, silo: str, round: int) -> None:
        """Its tasks are cancelled, and what it may still say of them is not read."""
        self._inbox.withdraw(silo, round)
        for assigned in list(self._waiting.values()):
            if (assigned.question.silo, assigned.question.round) == (silo, round):
                self._drop(assigned)

    def close(self) -> None:
        """Cancel what is open."""
        for assigned in list(self._waiting.values()):
            self._drop(assigned)

    def _came(self, assigned: _Assigned) -> Came:
        def came(frame: Frame | None, problem: str) -> None:
            if self._waiting.pop(id(assigned), None):  # else it was answered, given up or withdrawn
                self._inbox.put(assigned.question, assigned.start, frame, problem)

        return came

    def _give_up(self) -> None:
        now = time.monotonic()
        for assigned in list(self._waiting.values()):
            if now - assigned.start > assigned.patience and self._drop(assigned):
                self._inbox.put(assigned.question, assigned.start, None, f"no answer in {assigned.patience:g} seconds")

    def _drop(self, assigned: _Assigned) -> bool:
        """Cancel one that nothing has come of; says whether this was so."""
        if not self._waiting.pop(id(assigned), None):
            return False
        assigned.cancel()
        return True
