"""A silo's processes: the worker with torch and records, and Flower's SuperNode, both started again when they die."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fedloom.deployment.homes import SiloHome
from fedloom.deployment.processes import BIN, Child, Household, flower_environment, free_port
from fedloom.errors import FedloomError

GUARD = f"#!{sys.executable}\nfrom fedloom.deployment.guard import main\n\nmain()\n"
TOLD = {  # what Flower's exit means for a person
    "2004": "the server does not let this silo in: its key is not admitted, or it is still counted as joined "
    "(after a crash that takes a minute)",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not one of this federation, or has expired",
}


@dataclass
class Joining:
    """A silo that takes part until it is stopped."""

    home: SiloHome
    data: Path
    say: Callable[[str], None]
    household: Household = field(default_factory=Household)

    def __enter__(self) -> Joining:
        if not self.data.exists():
            raise FedloomError(f"--data {self.data} does not exist; give an .npz file or a folder of images")
        self._lock = self._locked()
        # A socket's name must be short, which the name of the silo's folder need not be.
        self._runtime = Path(tempfile.mkdtemp(prefix="fedloom-"))
        socket = self._runtime / "worker"
        self.worker = self.household.add(self._worker(socket))
        self.node = self.household.add(self._node(socket))
        return self

    def __exit__(self, *_: object) -> None:
        self.household.stop()
        shutil.rmtree(self._runtime, ignore_errors=True)
        self._lock.close()

    def tend(self) -> None:
        """Look after both; to be called every few seconds."""
        for child in self.household.tend():
            if child is self.worker and child.process is not None and child.process.returncode == 2:
                raise FedloomError(re.sub(r"^[^A-Z]*ERROR ", "", child.last_words()))
            self.say(f"{child.name} ended and is started again: {_meaning(child)}")

    def _locked(self) -> IO[str]:
        """A silo joins once: two at a time would train, and pay, twice."""
        lock = (self.home.path / "joined.lock").open("w", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise FedloomError(f"silo '{self.home.name}' has joined already, from this very folder") from error
        return lock

    def _worker(self, socket: Path) -> Child:
        command = [sys.executable, "-m", "fedloom.deployment.worker", str(self.home.path.resolve())]
        command += [str(self.data.resolve()), str(socket)]
        return Child("worker", command, self.home.logs / "worker.log", {"OMP_WAIT_POLICY": "PASSIVE", **os.environ})

    def _node(self, socket: Path) -> Child:
        home, charter = self.home.path.resolve(), self.home.invitation.charter
        commands = home / "flower" / "commands"
        commands.mkdir(parents=True, exist_ok=True)
        (commands / "flwr-clientapp").write_text(GUARD, encoding="utf-8")
        (commands / "flwr-clientapp").chmod(0o700)
        command = [str(BIN / "flower-supernode"), "--superlink", charter.address]
        command += ["--root-certificates", str(home / "ca.crt")]
        command += ["--auth-supernode-private-key", str(home / "node.key")]
        command += ["--host", "127.0.0.1", "--port", str(free_port()), "--node-config", f'worker="{socket}"']
        environment = flower_environment(home / "flower", before=(commands,))
        return Child("supernode", command, self.home.logs / "supernode.log", environment)


def _meaning(child: Child) -> str:
    words = child.last_words(12)
    return next((told for sign, told in TOLD.items() if sign in words), child.last_words())
