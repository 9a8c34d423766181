"""A silo's processes: the worker, which has the records and no network, and the node, which has the key and no records.

Both are started again when they die. Without bubblewrap to keep them apart, one process is both.
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

from fedloom.deployment.confinement import Rights, bubblewrap, confined
from fedloom.deployment.directories import SiloDirectory
from fedloom.deployment.processes import Child, Household, locked, troubles
from fedloom.errors import FedloomError, page_path
from fedloom.privacy.registry import KEY, VARIABLE, LedgerRegistry, registry_folder

UNCONFINED = (
    "the worker has all rights of this user: bubblewrap (Debian's package) is not installed, or not allowed here; "
    f"{page_path('deployment.md')} says what it would take away"
)


@dataclass
class Joining:
    """A silo that takes part until it is stopped."""

    home: SiloDirectory
    data: Path
    say: Callable[[str], None]
    registry: Path = field(default_factory=registry_folder)
    source: str = ""  # of the records, where the data do not speak for themselves
    proxy: str = ""  # by which the server is reached
    apart: bool = field(default_factory=lambda: bool(bubblewrap()))  # whether key and records have a process each
    household: Household = field(default_factory=Household)

    def __enter__(self) -> Joining:
        self.home.invitation.charter.require_direct(self.home.path)
        if not self.data.exists():
            raise FedloomError(f"--data {self.data} does not exist; give a table, an .npz file or a folder of images")
        (self.home.path / "approvals").mkdir(exist_ok=True)  # which an earlier version did not make
        LedgerRegistry(self.registry).close()  # the worker may write there, but not make the folder
        self._lock = self._locked()
        # A socket's name must be short, which the name of the silo's folder need not be.
        self._runtime = Path(tempfile.mkdtemp(prefix="fedloom-"))
        if not bubblewrap():
            self.say(UNCONFINED)
        try:
            if self.apart:
                self.worker = self.household.add(self._worker())
                self.node = self.household.add(self._node())
            else:
                self.worker = self.node = self.household.add(self._silo())
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
        news = self.node.news()
        for trouble in troubles(news):
            self.say(f"{self.node.name}: {trouble}")
        if "INFO connected" in news:
            self.say(f"silo '{self.home.name}' is connected with {self.home.invitation.charter.address}")
        for child in self.household.tend():
            if child is self.worker and child.process is not None and child.process.returncode == 2:
                raise FedloomError(re.sub(r"^[^A-Z]*ERROR ", "", child.last_words()))
            self.say(f"{child.name} ended and is started again: {child.last_words()}")

    def _locked(self) -> IO[str]:
        """A silo joins once: two at a time would train, and pay, twice."""
        taken = f"silo '{self.home.name}' has joined already, from this very folder"
        return locked(self.home.lock, taken)

    def _worker(self) -> Child:
        """It writes its ledger and rounds into the silo's folder, and can change nothing else there.

        Beside that it writes into the registry of ledgers.
        """
        home, data = self.home.path.resolve(), self.data.resolve()
        command = [
            sys.executable,
            "-m",
            "fedloom.deployment.worker_process",
            str(home),
            str(data),
            str(self._runtime / "worker"),
            self.source,
        ]
        rights = Rights(
            writes=(home, self._runtime, self.registry.resolve()),
            only_reads=(*self.home.settled, *((data,) if home in data.parents else ())),
            never_sees=(home / "node.key",),
        )
        own = {"TMPDIR": str(self._runtime), VARIABLE: str(self.registry.resolve())}
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **own}
        # A worker that outlives this command still counts as joined.
        log = self.home.logs / "worker.log"
        return Child("worker", confined(command, rights), log, environment, holds=(self._lock.fileno(),))

    def _node(self) -> Child:
        """It reads its key, reaches the server, and sees no record."""
        key = self.registry.resolve() / KEY  # with which it could guess at records by their digests
        post = self.home.post.resolve()
        post.mkdir(mode=0o700, exist_ok=True)  # the node may write there, but not make the folder
        rights = Rights(writes=(post,), never_sees=(self.data.resolve(), key), network=True)
        command = confined(self._process(str(self._runtime / "worker")), rights)
        return Child("node", command, self.home.logs / "node.log", dict(os.environ))

    def _silo(self) -> Child:
        """Worker and node in one, for which there would be no wall between them."""
        command = [*self._process(""), str(self.data.resolve()), self.source]
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, VARIABLE: str(self.registry.resolve())}
        return Child("silo", command, self.home.logs / "silo.log", environment, holds=(self._lock.fileno(),))

    def _process(self, socket: str) -> list[str]:
        module = "fedloom.deployment.direct.silo_process"
        return [sys.executable, "-m", module, str(self.home.path.resolve()), self.proxy, socket]
