"""The processes of a server under the wire `flower`: SuperLink, executor, nginx, and the register of who may join."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fedloom.deployment.control import TAKEN_BACK, Control
from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.keys import pem_of
from fedloom.deployment.processes import Child, Household, flower_environment, locked
from fedloom.deployment.proxy import configuration, nginx
from fedloom.errors import FedloomError
from fedloom.runs.files import write_atomically

STARTING = 60.0  # seconds within which a SuperLink must answer
RETRY = 10.0  # seconds before the register is tried again where it could not be changed


@dataclass
class FlowerServing:
    """A server that runs until it is stopped."""

    home: ServerDirectory
    say: Callable[[str], None]
    proxy: bool = True
    household: Household = field(default_factory=Household)
    _settled: dict[str, bytes] | None = None  # the keys that the SuperLink was last found to know
    _again: float = 0.0

    def __enter__(self) -> FlowerServing:
        if self.proxy:
            nginx()  # complains before anything is started
        self._lock = locked(self.home.path / "served.lock", f"{self.home.path} is served already, by another process")
        self.control = Control(self.home)
        self._socket = self.home.door.make()
        try:
            self.superlink = self.household.add(self._superlink())
            self._await()
            self.executor = self.household.add(self._python("executor", "executor", str(self.home.path.resolve())))
            if self.proxy:
                self.household.add(self._proxy())
            self.register()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.household.stop()
        self.home.door.remove()
        self._lock.close()

    def tend(self) -> None:
        """Look after the processes and the register; to be called every few seconds."""
        for child in self.household.tend():
            self.say(f"{child.name} ended and is started again: {child.last_words()}")
            if child is self.superlink:
                self._settled = None  # the next one knows nobody
                self.executor.signal(signal.SIGKILL)  # and none of the runs, which must be resumed
        try:
            self.register()
        except FedloomError as error:  # a SuperLink that is busy is asked again next time
            self.say(str(error))

    def register(self) -> None:
        """Let the SuperLink know the keys that are admitted, and no others.

        It is asked what it knows, so a crash between its note and ours does no harm.
        """
        admitted, now = self.home.keys_admitted(), time.monotonic()
        if admitted == self._settled or now < self._again or not self.control.answers:
            return
        wanted = {silo: pem_of(line) for silo, line in admitted.items()}
        nodes = self.control.nodes()
        told = []
        for node in nodes:
            if node.status != TAKEN_BACK and wanted.get(node.silo) != node.key:
                news = f"silo '{node.silo}' may no longer join with the key that it had"
                told.append(self._tell(node.silo, partial(self.control.unregister, node), news))
        known = {node.key: node for node in nodes}
        for silo, key in wanted.items():
            if key not in known:
                told.append(self._tell(silo, partial(self.control.register, silo, key), f"silo '{silo}' may join"))
            elif known[key].status == TAKEN_BACK or known[key].silo != silo:  # Flower knows a key once, for good
                self.say(f"silo '{silo}' cannot join with a key that was taken back, or is another's: enroll it anew")
        if all(told):
            self._settled = admitted
        else:
            self._again = now + RETRY

    def _tell(self, silo: str, change: Callable[[], None], news: str) -> bool:
        """Change the SuperLink's register for one silo; whether it did. What goes wrong concerns this silo alone."""
        try:
            change()
        except FedloomError as error:
            self.say(f"the register was not changed for silo '{silo}': {error}")
            return False
        self.say(news)
        return True

    def _superlink(self) -> Child:
        keys = self.home.keys.resolve()
        flower = ["--enable-supernode-auth", "--isolation", "process", "--disable-runtime-dependency-installation"]
        flower += ["--ssl-ca-certfile", str(keys / "ca.crt")]
        flower += ["--ssl-certfile", str(keys / "server.crt"), "--ssl-keyfile", str(keys / "server.key")]
        flower += ["--host", "127.0.0.1", "--port", str(self.home.settings.port)]
        # Its state stays in memory: on disk its own threads lock each other out, and answers of silos are lost.
        return self._python("superlink", "superlink", after=flower)

    def _python(self, name: str, module: str, *before: str, after: Sequence[str] = ()) -> Child:
        """A module of ours that is told where the socket is."""
        command = [sys.executable, "-m", f"fedloom.deployment.{module}", *before, str(self._socket), *after]
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **flower_environment(self.home.flower.resolve())}
        return Child(name, command, self.home.logs / f"{name}.log", environment)

    def _await(self) -> None:
        end = time.monotonic() + STARTING
        while not self.control.answers:
            if self.superlink.process is None or self.superlink.process.poll() is not None or time.monotonic() > end:
                raise FedloomError(f"the SuperLink does not start: {self.superlink.last_words(3)}")
            time.sleep(0.2)

    def _proxy(self) -> Child:
        folder = (self.home.path / "nginx").resolve()
        folder.mkdir(exist_ok=True)
        charter, file = self.home.charter, folder / "nginx.conf"
        text = configuration(
            charter.name,
            self.home.keys.resolve(),
            folder,
            self.home.logs.resolve(),
            self.home.settings.listen or str(charter.port),
            self.home.settings.port,
        )
        write_atomically(file, text.encode())
        command = [nginx(), "-p", str(folder), "-c", str(file), "-g", "daemon off;"]
        log = self.home.logs / "proxy.log"
        return Child("proxy", command, log, flower_environment(self.home.flower.resolve()))
