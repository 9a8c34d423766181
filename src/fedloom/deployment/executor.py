"""Starts a process at the server for each run that the coordinator asks for; torch is loaded once, and forked."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.runtime import RuntimeHttpClient

from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.door import through
from fedloom.deployment.server_app import carry_out

log = logging.getLogger(__name__)
POLL, TIMEOUT = 0.3, 30.0  # seconds


def main(folder: str, door: str) -> None:
    """Ask for runs until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; 'serve' stops this in order
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # how a run ended is written beside its submission
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
    with through(RuntimeHttpClient, Path(door), "SuperExec", TIMEOUT) as client:
        while True:
            try:
                found = client.AcquireTask(wanted)
            except httpx.HTTPError as error:  # a SuperLink that is busy
                log.warning("no run can be asked for: %s", error)
                time.sleep(1.0)
                continue
            if found.token and os.fork() == 0:
                for number in (signal.SIGINT, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                carry_out(ServerDirectory.open(Path(folder)), Path(door), found.token)  # as its files say now
                return
            time.sleep(POLL)


if __name__ == "__main__":
    main(*sys.argv[1:])
