"""A silo's worker as a process: records and torch, and no network; its node asks it."""

from __future__ import annotations

import logging
import signal
import sys
from multiprocessing.connection import Listener
from pathlib import Path

from fedloom.deployment.processes import loading
from fedloom.engines.remote.frames import Frame
from fedloom.errors import FedloomError

log = logging.getLogger(__name__)


def main(home: str, data: str, socket: str, source: str = "") -> None:
    """Serve until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; 'join' stops this in order
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with loading():
        from fedloom.deployment.worker import answering
    try:
        answer = answering(Path(home), Path(data), source)
    except FedloomError as error:
        log.error("%s", error)
        sys.exit(2)
    Path(socket).unlink(missing_ok=True)
    with Listener(socket, family="AF_UNIX") as listener:
        log.info("ready")
        while True:
            try:
                with listener.accept() as connection:
                    connection.send_bytes(answer(Frame.of_bytes(connection.recv_bytes())).to_bytes())
            except (EOFError, OSError, FedloomError) as error:  # who asked is gone, or did not ask in our words
                log.warning("a question came to nothing: %s", error)


if __name__ == "__main__":
    main(*sys.argv[1:])
