"""Answers on their way to the rounds: put in by whichever thread has them, taken out in the order they came in."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.wire import Answer, Question


class Inbox:
    """What a wire has received, less what was withdrawn."""

    def __init__(self) -> None:
        self._come: queue.Queue[Answer] = queue.Queue()
        self._withdrawn: set[tuple[str, int]] = set()

    def expect(self, questions: Sequence[Question]) -> None:
        """Whatever was withdrawn before, answers to these are wanted."""
        self._withdrawn.difference_update((question.silo, question.round) for question in questions)

    def put(self, question: Question, start: float, frame: Frame | None, problem: str = "") -> None:
        """What came of a question that was asked at ``start``; an answer longer than allowed is a problem."""
        if frame is not None and frame.size > question.limit:
            problem = f"its answer has {frame.size} bytes; {question.limit} are allowed"
            frame = None
        self._come.put(Answer(question.silo, question.round, time.monotonic() - start, frame, problem))

    def next(self, timeout: float) -> Answer | None:
        """The next one that is wanted, if it comes in time."""
        end = time.monotonic() + timeout
        while True:
            try:
                found = self._come.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            if (found.silo, found.round) not in self._withdrawn:
                return found

    def withdraw(self, silo: str, round: int) -> None:
        """Nobody wants this silo's answers of a round any more."""
        self._withdrawn.add((silo, round))
