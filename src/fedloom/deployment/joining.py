"""A silo's processes: the worker with torch and records, Flower's SuperNode, and the nursery of its short-lived ones.

All of them are started again when they die.
"""

from __future__ import annotations

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
from fedloom.deployment.nursery import write_command
from fedloom.deployment.processes import BIN, Child, Household, flower_environment, free_port, locked
from fedloom.errors import FedloomError

GIVEN_UP = "SSL/TLS handshake error"  # Flower's threads then end one by one, but its server keeps the process alive
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
        try:
            self.worker = self.household.add(self._worker())
            self.nursery = self.household.add(self._nursery())
            self.node = self.household.add(self._node())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.household.stop()
        shutil.rmtree(self._runtime, ignore_errors=True)
        self._lock.close()

    def tend(self) -> None:
        """Look after them; to be called every few seconds."""
        for child in self.household.tend():
            if child is self.worker and child.process is not None and child.process.returncode == 2:
                raise FedloomError(re.sub(r"^[^A-Z]*ERROR ", "", child.last_words()))
            self.say(f"{child.name} ended and is started again: {_meaning(child)}")

    def _locked(self) -> IO[str]:
        """A silo joins once: two at a time would train, and pay, twice."""
        taken = f"silo '{self.home.name}' has joined already, from this very folder"
        return locked(self.home.path / "joined.lock", taken)

    def _worker(self) -> Child:
        command = [sys.executable, "-m", "fedloom.deployment.worker", str(self.home.path.resolve())]
        command += [str(self.data.resolve()), str(self._runtime / "worker")]
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        # A worker that outlives this command still counts as joined.
        return Child("worker", command, self.home.logs / "worker.log", environment, holds=(self._lock.fileno(),))

    def _nursery(self) -> Child:
        command = [sys.executable, "-m", "fedloom.deployment.nursery", str(self._runtime / "nursery")]
        return Child("nursery", command, self.home.logs / "supernode.log", self._environment)

    def _node(self) -> Child:
        home, charter = self.home.path.resolve(), self.home.invitation.charter
        write_command(self._runtime / "flwr-clientapp", self._runtime / "nursery")
        command = [str(BIN / "flower-supernode"), "--superlink", charter.address]
        command += ["--root-certificates", str(home / "ca.crt")]
        command += ["--auth-supernode-private-key", str(home / "node.key")]
        command += ["--host", "127.0.0.1", "--port", str(free_port())]
        command += ["--node-config", f'worker="{self._runtime / "worker"}"']
        log = self.home.logs / "supernode.log"
        return Child("supernode", command, log, self._environment, gives_up=GIVEN_UP)

    @property
    def _environment(self) -> dict[str, str]:
        """Flower finds the command that goes by the guard before its own."""
        flower = self.home.path.resolve() / "flower"
        flower.mkdir(exist_ok=True)
        return flower_environment(flower, before=(self._runtime,))


def _meaning(child: Child) -> str:
    words = child.last_words(12)
    return next((told for sign, told in TOLD.items() if sign in words), child.last_words())
