"""The server's processes under the direct wire: the hub, which silos call, and the executor, which carries runs out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fedloom.deployment.direct.wire import HubCalls
from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.processes import Child, Household, locked
from fedloom.errors import FedloomError

STARTING = 60.0  # seconds within which a hub must answer


@dataclass
class DirectServing:
    """A server that runs until it is stopped."""

    home: ServerDirectory
    say: Callable[[str], None]
    household: Household = field(default_factory=Household)
    _asking: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> DirectServing:
        self._lock = locked(self.home.path / "served.lock", f"{self.home.path} is served already, by another process")
        socket = self.home.door.make()
        folder = str(self.home.path.resolve())
        try:
            self.hub = self.household.add(self._child("hub", "hub_process", folder, str(socket)))
            self._await()
            self.executor = self.household.add(self._child("executor", "executor", folder))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.household.stop()
        self.home.door.remove()
        self._lock.close()

    def tend(self) -> None:
        """Look after the processes, and say who asks to be admitted; to be called every few seconds."""
        for child in self.household.tend():
            self.say(f"{child.name} ended and is started again: {child.last_words()}")
        asking = self.home.asking()
        for silo, key in asking.items():
            if self._asking.get(silo) != key:
                self.say(f"silo '{silo}' asks to be admitted, with the key {key}")
        self._asking = asking

    def _child(self, name: str, module: str, *arguments: str) -> Child:
        command = [sys.executable, "-m", f"fedloom.deployment.direct.{module}", *arguments]
        return Child(name, command, self.home.logs / f"{name}.log", {"OMP_WAIT_POLICY": "PASSIVE", **os.environ})

    def _await(self) -> None:
        end, calls = time.monotonic() + STARTING, HubCalls(lambda: self.home.door.socket, patience=0.0)
        while True:
            try:
                calls.call("present")
                calls.close()
                return
            except FedloomError as error:
                process = self.hub.process
                if process is None or process.poll() is not None or time.monotonic() > end:
                    raise FedloomError(f"the hub does not start: {self.hub.last_words()}") from error
            time.sleep(0.1)
