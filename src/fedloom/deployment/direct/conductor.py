"""A coordinator's hands under the direct wire: runs are handed in as files, which the executor finds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fedloom.deployment.direct.wire import HubCalls
from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.processes import is_locked
from fedloom.deployment.submissions import Submission
from fedloom.errors import FedloomError
from fedloom.runs.files import write_atomically

AWAY = 60.0  # seconds without a server, after which nobody waits for a run any more


@dataclass
class DirectConductor:
    """The runs and silos of a server of this machine."""

    home: ServerDirectory
    _submission: Submission | None = None
    _seen: float = 0.0  # when a server was last there

    @property
    def answers(self) -> bool:
        """Whether the hub is there."""
        try:
            self._present()
        except FedloomError:
            return False
        return True

    def silos(self) -> dict[str, dict[str, Any]]:
        """Those that attend."""
        return {silo: {"there": "online", "device": facts["device"]} for silo, facts in self._present().items()}

    def start(self, submission: Submission) -> None:
        """It lies where the executor looks already."""
        self._submission, self._seen = submission, time.monotonic()

    def ending(self) -> str:
        """A server that dies and comes back goes on with its runs; one that stays away does not."""
        if is_locked(self.home.path / "served.lock"):
            self._seen = time.monotonic()
        return "" if time.monotonic() - self._seen < AWAY else "its server is not there any more"

    def stop(self) -> None:
        """Told to the executor by a file."""
        if self._submission is not None:
            write_atomically(self._submission.stopping, b"")

    def _present(self) -> dict[str, dict[str, Any]]:
        calls = HubCalls(lambda: self.home.door.socket, patience=0.0)
        try:
            return dict(calls.call("present"))
        finally:
            calls.close()
