"""Where the processes come from that Flower wants one of for every message.

Loading Flower takes one to two seconds of a core, each time. Here it is loaded once, and the process forks itself. The
command that Flower starts only sends its arguments and waits until the fork has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

LOADED = ("flwr.supernode.cli", "flwr.supernode.runtime.run_clientapp", "fedloom.deployment.client_app")
COMMAND = """\
#!{python} -IS
import json, os, socket, sys

try:
    nursery = socket.socket(socket.AF_UNIX)
    nursery.connect({place!r})
    nursery.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
except OSError:  # it is just being started
    os.execv({python!r}, [{python!r}, "-m", "fedloom.deployment.guard", *sys.argv[1:]])
nursery.recv(1)  # nothing comes; it ends when the app has ended
"""


def write_command(path: Path, place: Path) -> None:
    """A command that has its work done in the nursery at a place, or does it by itself if nobody is there."""
    path.write_text(COMMAND.format(python=sys.executable, place=str(place)), encoding="utf-8")
    path.chmod(0o700)


def main(place: str) -> None:
    """Fork for everybody who asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for the worker
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
    for module in LOADED:
        importlib.import_module(module)
    Path(place).unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX)
    door.bind(place)
    door.listen()
    while True:
        caller, _ = door.accept()
        arguments = json.loads(caller.makefile("r").readline() or "[]")
        if os.fork() == 0:
            door.close()
            _become_the_app(arguments)
            return
        caller.close()


def _become_the_app(arguments: list[str]) -> None:
    from fedloom.deployment.guard import main as guarded

    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = ["flwr-clientapp", *arguments]
    guarded()


if __name__ == "__main__":
    main(*sys.argv[1:])
