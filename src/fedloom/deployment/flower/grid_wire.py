"""Asking silos through Flower's grid: every question waits for its answer in a thread of its own.

Flower's calls may block far beyond their own timeouts. Here only a thread that waits for one silo can be held up, and
whoever reads the answers decides how long to wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from flwr.app import Message

from fedloom.deployment.flower.messages import asked, frame_of
from fedloom.engines.remote.inbox import Inbox
from fedloom.engines.remote.wire import Answer, Question

POLL = 0.3  # seconds between two looks for an answer
LOOK = 5.0  # seconds that a look at who is there may take

log = logging.getLogger(__name__)


class FlowerGrid(Protocol):
    """What is used of Flower's grid."""

    def get_nodes(self) -> Any:
        """Nodes that are online, each with ``node_id`` and the ``name`` that it was registered under."""
        ...

    def push_messages(self, messages: Any) -> Any:
        """Send; the ids of the messages."""
        ...

    def pull_messages(self, message_ids: Any) -> Any:
        """Answers that are there."""
        ...


class FlowerWire:
    """The contract kept through a grid."""

    def __init__(self, grid: FlowerGrid, poll: float = POLL) -> None:
        self._grid, self._poll = grid, poll
        self._inbox = Inbox()
        self._closed = threading.Event()
        self._seen: dict[str, int] = {}
        self._look: threading.Thread | None = None

    def online(self) -> dict[str, int]:
        """The nodes of silos that are there now, by name; as they were last seen, where Flower cannot say now."""
        if self._look is None or not self._look.is_alive():
            self._look = _in_background(self._see)
        self._look.join(LOOK)
        return self._seen

    def _see(self) -> None:
        try:
            self._seen = {node.name: node.node_id for node in self._grid.get_nodes()}
        except Exception as error:  # a SuperLink that is busy, or is just being started again
            log.warning("who is there cannot be told: %s: %s", type(error).__name__, error)

    def ask(self, questions: Sequence[Question], patience: float) -> None:
        """Send questions; to each an answer, or a problem, comes within about ``patience`` seconds."""
        self._inbox.expect(questions)
        _in_background(lambda: self._send(questions, patience))

    def answer(self, timeout: float) -> Answer | None:
        """The next answer, if one comes in time."""
        return self._inbox.next(timeout)

    def withdraw(self, silo: str, round: int) -> None:
        """Its answers are not read; a silo of Flower's cannot be told so, and may go on working."""
        self._inbox.withdraw(silo, round)

    def close(self) -> None:
        """Let the threads end."""
        self._closed.set()

    def _send(self, questions: Sequence[Question], patience: float) -> None:
        """All at once, because what several are sent is uploaded for the first of them alone."""
        start = time.monotonic()
        try:
            numbers = self._grid.push_messages([asked(q.frame, q.node, str(q.round), patience) for q in questions])
        except Exception as error:  # whatever Flower raises concerns these silos alone
            for question in questions:
                self._inbox.put(question, start, None, f"it could not be asked: {type(error).__name__}: {error}")
            return
        for question, number in zip(questions, numbers, strict=True):
            _in_background(partial(self._wait, question, number, start, start + patience))

    def _wait(self, question: Question, number: str | None, start: float, end: float) -> None:
        """For the reply to exactly this message: error replies do not say whose they are."""
        try:
            reply = self._reply(number, end) if number else None
            if reply is None:
                self._inbox.put(question, start, None, f"no answer in {end - start:g} seconds")
            elif reply.has_error():
                self._inbox.put(question, start, None, f"{reply.error.reason} (Flower's error {reply.error.code})")
            else:
                self._inbox.put(question, start, frame_of(reply))
        except Exception as error:
            self._inbox.put(question, start, None, f"{type(error).__name__}: {error}")

    def _reply(self, number: str, end: float) -> Message | None:
        while time.monotonic() < end and not self._closed.is_set():
            for reply in self._grid.pull_messages([number]):
                return reply  # type: ignore[no-any-return]
            self._closed.wait(self._poll)
        return None


def _in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
