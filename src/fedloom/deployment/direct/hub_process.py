"""The hub as a process: the only one of a federation that takes connections, and no torch in it."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from fedloom.deployment.direct.desk import Desk
from fedloom.deployment.direct.hub import Hub
from fedloom.deployment.direct.mailbox import Mailbox
from fedloom.deployment.direct.parts import PartStore
from fedloom.deployment.direct.register import Register
from fedloom.deployment.direct.transport import make_server, server_credentials
from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.processes import locked
from fedloom.errors import FedloomError

log = logging.getLogger(__name__)
SPARE = 16  # threads beyond two for each silo: one attends, one works
GRACE = 1.0  # seconds in which calls may end


@dataclass
class OpenHub:
    """A hub that takes calls until its block ends."""

    home: ServerDirectory
    socket: Path  # for the runs of this machine
    address: str  # where it listens, host:port
    stopped: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> OpenHub:
        home = self.home
        home.post.mkdir(mode=0o700, exist_ok=True)
        self._lock = locked(home.post / "lock", f"{home.path} has a hub already")
        self._mailbox = Mailbox(home.post / "mailbox.sqlite")
        self.hub = Hub(Register(home), self._mailbox, PartStore(home.post / "parts"))
        self._server = make_server(self.hub.calls(), 2 * len(home.charter.silos) + SPARE)
        key, certificate = (home.keys / "server.key").read_bytes(), (home.keys / "server.crt").read_bytes()
        credentials = server_credentials(key, certificate, home.authority.encode())
        try:
            self.port = self._server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            self._close()
            raise FedloomError(f"cannot listen at {self.address}: {error}") from error
        self._desk = Desk(self.hub, self.socket)
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._desk.close()
        self._server.stop(GRACE).wait()
        self._close()

    def _close(self) -> None:
        self._mailbox.close()
        self._lock.close()


def main(folder: str, socket: str) -> None:
    """Serve until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; 'serve' stops this in order
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    home = ServerDirectory.open(Path(folder))
    Path(socket).unlink(missing_ok=True)  # of one that died
    try:
        with OpenHub(home, Path(socket), home.listening) as opened:
            signal.signal(signal.SIGTERM, lambda *_: opened.stopped.set())
            log.info("ready at port %s, grpcio %s", opened.port, grpc.__version__)
            opened.stopped.wait()
    except FedloomError as error:
        log.error("%s", error)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
