"""How the process that has the silo's key reaches its worker, which has the records. Nothing here needs torch."""

from __future__ import annotations

import time
from multiprocessing.connection import Client, Connection
from pathlib import Path

from fedloom.engines.remote.frames import Frame
from fedloom.errors import FedloomError

REFUSED = "refused: "  # begins every line of a silo's logs that says so, which 'join' and 'status' show
DEVICE = "device"  # the question on what a worker trains
PATIENCE = 120.0  # seconds in which a worker may start again


def ask_worker(socket: Path, frame: Frame, patience: float = PATIENCE) -> Frame:
    """The worker's answer; a worker that is just being started is waited for."""
    connection = _connected(socket, patience)
    try:
        connection.send_bytes(frame.to_bytes())
        return Frame.of_bytes(connection.recv_bytes())
    except (EOFError, OSError) as error:
        raise FedloomError("the silo's worker ended before it had answered") from error
    finally:
        connection.close()


def _connected(socket: Path, patience: float) -> Connection:
    end = time.monotonic() + patience
    while True:
        try:
            return Client(str(socket), family="AF_UNIX")
        except OSError as error:
            if time.monotonic() > end:
                raise FedloomError("the silo's worker does not answer") from error
            time.sleep(0.2)
