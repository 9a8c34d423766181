"""Where runs hand in their orders: a socket in a folder that the server's owner alone can enter."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from fedloom.deployment.direct.hub import Hub
from fedloom.deployment.direct.letters import Letter
from fedloom.errors import FedloomError

log = logging.getLogger(__name__)


class Desk:
    """Answers the runs of this machine, each connection in a thread of its own."""

    def __init__(self, hub: Hub, socket: Path) -> None:
        self._hub, self._closed = hub, False
        self._listener = Listener(str(socket), family="AF_UNIX", backlog=64)
        self._services: dict[str, Callable[..., Any]] = {
            "present": self._present,
            "order": self._order,
            "answers": self._answers,
            "took": hub.took,
            "withdraw": hub.withdraw,
            "finished": hub.finished,
        }
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more calls, and answer none that are under way."""
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    asked = json.loads(connection.recv_bytes())
                    if self._closed:
                        return
                    try:
                        said = {"result": self._services[asked.pop("service")](**asked)}
                    except FedloomError as error:
                        said = {"problem": str(error)}
                    connection.send_bytes(json.dumps(said).encode())
                except (EOFError, OSError):
                    return

    def _present(self) -> dict[str, Any]:
        return {
            silo: {"number": presence.number, "since": presence.since, **presence.facts}
            for silo, presence in self._hub.present().items()
        }

    def _order(self, silo: str, run: str, round: int, letter: str) -> int:
        return self._hub.order(silo, run, round, Letter.of_bytes(letter.encode())).attempt

    def _answers(self, numbers: list[str], seconds: float) -> list[str]:
        return [letter.to_bytes().decode() for letter in self._hub.answers(numbers, seconds)]
