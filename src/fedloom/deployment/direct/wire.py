"""The direct wire at the server: a run's questions become orders at the hub, which keeps them whoever dies."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from fedloom.deployment.direct.letters import Letter
from fedloom.deployment.direct.parts import PartStore
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.wire import Answer, Question
from fedloom.errors import FedloomError

log = logging.getLogger(__name__)
PATIENCE = 120.0  # seconds in which a hub may start again


class HubCalls:
    """Calls to the hub of this machine; one that is just being started again is waited for."""

    def __init__(self, socket: Callable[[], Path | None], patience: float = PATIENCE) -> None:
        self._socket, self._patience = socket, patience
        self._connection: Connection | None = None

    def call(self, service: str, **asked: Any) -> Any:
        """What the hub says; every call may be made twice without harm."""
        end, text = time.monotonic() + self._patience, json.dumps({"service": service, **asked}).encode()
        while True:
            try:
                if self._connection is None:
                    self._connection = self._connected()
                self._connection.send_bytes(text)
                said = json.loads(self._connection.recv_bytes())
                break
            except (EOFError, OSError) as error:
                self.close()
                if time.monotonic() > end:
                    raise FedloomError("the server's hub does not answer") from error
                time.sleep(0.1)
        if "problem" in said:
            raise FedloomError(said["problem"])
        return said["result"]

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> Connection:
        socket = self._socket()
        if socket is None:
            raise FileNotFoundError("no hub")
        return Client(str(socket), family="AF_UNIX")


@dataclass
class _Asked:
    """A question that waits for its answer."""

    question: Question
    start: float
    end: float


class DirectWire:
    """The contract kept through the hub, in the name of one run."""

    def __init__(self, run: str, calls: HubCalls, parts: PartStore) -> None:
        self._run, self._calls, self._parts = run, calls, parts
        self._waiting: dict[str, list[_Asked]] = {}  # by an order's number
        self._come: deque[Answer] = deque()

    def online(self) -> Mapping[str, int]:
        """The silos that attend."""
        return {silo: facts["number"] for silo, facts in self._calls.call("present").items()}

    def ask(self, questions: Sequence[Question], patience: float) -> None:
        """Orders, on disk before this returns; what several are sent is written once."""
        start = time.monotonic()
        for question in questions:
            self._parts.keep(question.frame)
            letter = Letter.order(question.silo, question.frame, question.limit)
            asked = _Asked(question, start, start + patience)
            order = {"silo": question.silo, "run": self._run, "round": question.round}
            try:
                self._calls.call("order", **order, letter=letter.to_bytes().decode())
            except FedloomError as error:
                self._put(asked, None, f"it could not be asked: {error}")
            else:
                self._waiting.setdefault(letter.number, []).append(asked)

    def answer(self, timeout: float) -> Answer | None:
        """The next one that has come, or a problem with one that has not."""
        if not self._come and self._waiting:
            texts = self._calls.call("answers", numbers=list(self._waiting), seconds=timeout)
            self._take([Letter.of_bytes(text.encode()) for text in texts])
            self._give_up()
        elif not self._come:
            time.sleep(timeout)
        return self._come.popleft() if self._come else None

    def withdraw(self, silo: str, round: int) -> None:
        """The order is struck out, and a silo that has not begun with it does not."""
        of_silo = {
            number: asked
            for number, asked in self._waiting.items()
            if (asked[0].question.silo, asked[0].question.round) == (silo, round)
        }
        for number in of_silo:
            del self._waiting[number]
        self._calls.call("withdraw", numbers=list(of_silo))

    def close(self) -> None:
        """Strike out all that is open."""
        try:
            if self._waiting:
                self._calls.call("withdraw", numbers=list(self._waiting))
        finally:
            self._waiting.clear()
            self._calls.close()

    def _take(self, letters: list[Letter]) -> None:
        """Answers as frames, each to everyone who has asked for it."""
        frames = [letter.frame(self._parts.read({part.sha256 for part in letter.parts})) for letter in letters]
        if letters:
            self._calls.call("took", numbers=[letter.number for letter in letters])
        for letter, frame in zip(letters, frames, strict=True):
            for asked in self._waiting.pop(letter.number):
                self._put(asked, frame)

    def _give_up(self) -> None:
        now = time.monotonic()
        for number, asked in list(self._waiting.items()):
            if all(each.end < now for each in asked):
                del self._waiting[number]
                self._calls.call("withdraw", numbers=[number])
                for each in asked:
                    self._put(each, None, f"no answer in {each.end - each.start:g} seconds")

    def _put(self, asked: _Asked, frame: Frame | None, problem: str = "") -> None:
        seconds = time.monotonic() - asked.start
        self._come.append(Answer(asked.question.silo, asked.question.round, seconds, frame, problem))
