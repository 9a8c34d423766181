"""The server's processes: SuperLink on loopback, nginx before it, and the register of who may join."""

from __future__ import annotations

import json
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedloom.deployment.guard import CLIENT_APP, SERVER_APP
from fedloom.deployment.homes import ServerHome
from fedloom.deployment.keys import pem_of
from fedloom.deployment.processes import BIN, Child, Household, flower_environment, locked
from fedloom.deployment.proxy import configuration, nginx
from fedloom.deployment.submissions import Submission
from fedloom.errors import FedloomError
from fedloom.runs.files import write_atomically

STARTING = 60.0  # seconds within which a SuperLink must answer
ANSWERING = 10.0  # seconds that a call may take
RETRY = 10.0  # seconds before the register is tried again where it could not be changed
TAKEN_BACK = "unregistered"
APP = f"""\
[project]
name = "fedloom-app"
version = "1.0.0"
description = "Points to what every machine has installed itself."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedloom"

[tool.flwr.app.components]
serverapp = "{SERVER_APP}"
clientapp = "{CLIENT_APP}"

[tool.flwr.app.config]
submission = ""
"""


@dataclass(frozen=True)
class Node:
    """A silo's key as the SuperLink knows it."""

    number: str
    silo: str
    key: bytes  # PEM
    status: str  # registered, online, offline, unregistered


@dataclass(frozen=True)
class Control:
    """Flower's own command line, turned to this server's SuperLink."""

    home: ServerHome

    def __call__(self, *arguments: str) -> dict[str, Any]:
        """Run a command; its answer as plain values."""
        self._prepare()
        command = [str(BIN / "flwr"), *arguments, "--format", "json"]
        environment = flower_environment(self.home.flower.resolve())
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=STARTING, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise FedloomError(f"'flwr {' '.join(arguments[:2])}' has not answered in {STARTING:g} seconds") from error
        try:
            answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError as error:
            said = " ".join((done.stderr or done.stdout).split())[-300:]
            raise FedloomError(f"'flwr {' '.join(arguments[:2])}' failed: {said}") from error
        if not answer.get("success", True):
            raise FedloomError(f"'flwr {' '.join(arguments[:2])}' failed: {answer.get('error-message', answer)}")
        return answer

    def _prepare(self) -> None:
        ca = (self.home.keys / "ca.crt").resolve()
        text = f'[superlink]\ndefault = "federation"\n\n[superlink.federation]\naddress = "{self._address}"\n'
        write_atomically(self.home.flower / "config.toml", (text + f'root-certificates = "{ca}"\n').encode())

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{self.home.settings.port}"

    @property
    def answers(self) -> bool:
        """Whether the SuperLink is there."""
        try:
            self._opened("/health").close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def _opened(self, path: str, headers: Mapping[str, str] | None = None, content: bytes | None = None) -> Any:
        """The SuperLink's answer to a call, which is posted if there is any content."""
        context = ssl.create_default_context(cafile=str(self.home.keys / "ca.crt"))
        request = urllib.request.Request(f"https://{self._address}{path}", content, dict(headers or {}))
        return urllib.request.urlopen(request, timeout=ANSWERING, context=context)

    def nodes(self) -> list[Node]:
        """All nodes that were ever registered, with their keys, which Flower's command line does not show."""
        from flwr.proto.control_pb2 import ListNodesResponse
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

        headers = {"Content-Type": "application/protobuf"}
        try:
            with self._opened("/v1/control/list-nodes", headers, b"") as answer:
                found = ListNodesResponse.FromString(answer.read()).nodes_info
        except (OSError, DecodeError) as error:
            raise FedloomError(f"the SuperLink does not tell whom it knows: {error}") from error
        return [Node(str(node.node_id), node.name, node.public_key, node.status) for node in found]

    def start(self, submission: Submission) -> str:
        """Begin a run; returns Flower's number for it."""
        app = self.home.path / "app"
        app.mkdir(exist_ok=True)
        write_atomically(app / "pyproject.toml", APP.encode())
        chosen = f'submission="{submission.number}"'
        return str(self("run", str(app.resolve()), "federation", "-c", chosen)["run-id"])

    def run_status(self, number: str) -> str:
        """Flower's word for how a run is."""
        return str(self("ls", "federation", "--run-id", number)["runs"][0]["status"])

    def stop(self, number: str) -> None:
        """End a run."""
        self("stop", number, "federation")


@dataclass
class Serving:
    """A server that runs until it is stopped."""

    home: ServerHome
    say: Callable[[str], None]
    proxy: bool = True
    household: Household = field(default_factory=Household)
    _settled: dict[str, bytes] | None = None  # the keys that the SuperLink was last found to know
    _again: float = 0.0

    def __enter__(self) -> Serving:
        if self.proxy:
            nginx()  # complains before anything is started
        self._lock = locked(self.home.path / "served.lock", f"{self.home.path} is served already, by another process")
        self.control = Control(self.home)
        try:
            self.superlink = self.household.add(self._superlink())
            self._await()
            if self.proxy:
                self.household.add(self._proxy())
            self.register()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.household.stop()
        self._lock.close()

    def tend(self) -> None:
        """Look after the processes and the register; to be called every few seconds."""
        for child in self.household.tend():
            self.say(f"{child.name} ended and is started again: {child.last_words()}")
        try:
            self.register()
        except FedloomError as error:  # a SuperLink that is busy is asked again next time
            self.say(str(error))

    def register(self) -> None:
        """Let the SuperLink know the keys that are admitted, and no others.

        It is asked what it knows, so a crash between its note and ours, or a register that was lost, does no harm.
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
                told.append(self._tell(node.silo, ("unregister", node.number, "federation"), news))
        known = {node.key: node for node in nodes}
        for silo, key in wanted.items():
            if key not in known:
                path = str(self.home.admitted / f"{silo}.pub")
                command = ("register", path, "federation", "--name", silo)
                told.append(self._tell(silo, command, f"silo '{silo}' may join"))
            elif known[key].status == TAKEN_BACK or known[key].silo != silo:  # Flower knows a key once, for good
                self.say(f"silo '{silo}' cannot join with a key that was taken back, or is another's: enroll it anew")
        if all(told):
            self._settled = admitted
        else:
            self._again = now + RETRY

    def _tell(self, silo: str, command: tuple[str, ...], news: str) -> bool:
        """Change the SuperLink's register for one silo; whether it did. What goes wrong concerns this silo alone."""
        try:
            self.control("supernode", *command)
        except FedloomError as error:
            self.say(f"the register was not changed for silo '{silo}': {error}")
            return False
        self.say(news)
        return True

    def _superlink(self) -> Child:
        keys, flower = self.home.keys.resolve(), self.home.flower.resolve()
        command = [str(BIN / "flower-superlink"), "--enable-supernode-auth"]
        command += ["--ssl-ca-certfile", str(keys / "ca.crt")]
        command += ["--ssl-certfile", str(keys / "server.crt"), "--ssl-keyfile", str(keys / "server.key")]
        command += ["--host", "127.0.0.1", "--port", str(self.home.settings.port)]
        command += ["--database", str(flower / "state.db"), "--disable-runtime-dependency-installation"]
        return Child("superlink", command, self.home.logs / "superlink.log", flower_environment(flower))

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
