"""Wires under test: a server's half and silos that answer as a test says, all in one process, whatever the wire."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fedloom.deployment.charter import Charter
from fedloom.deployment.direct.attendant import Attendant
from fedloom.deployment.direct.credentials import Credentials
from fedloom.deployment.direct.hub_process import OpenHub
from fedloom.deployment.direct.mailbox import Mailbox
from fedloom.deployment.direct.parts import PartStore
from fedloom.deployment.direct.wire import DirectWire, HubCalls
from fedloom.deployment.directories import Invitation, ServerDirectory, ServerSettings, SiloDirectory
from fedloom.deployment.flower.grid_wire import FlowerWire
from fedloom.deployment.nvflare.wire import Came, NVFlareWire
from fedloom.deployment.processes import free_port
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.rules import RoundRules
from fedloom.engines.remote.wire import Wire
from local_grid import LocalGrid
from support import wait_for

SILOS = ("north", "south", "west")
Handler = Callable[[Frame], Frame]


class Rig(Protocol):
    """A federation of three silos on one wire."""

    def wire(self) -> Wire:
        """The server's half, in the name of the run; another one after the first is closed."""
        ...

    def join(self, silo: str, handler: Handler) -> None:
        """Let a silo be there, whose worker answers so."""
        ...

    def leave(self, silo: str) -> None:
        """Let a silo be away, as after its process was killed."""
        ...

    def close(self) -> None:
        """Stop everything."""
        ...


class FlowerRig:
    """Flower's messages without its servers."""

    def __init__(self, folder: Path) -> None:
        self.grid = LocalGrid(dict.fromkeys(SILOS, lambda frame: frame))
        self.grid.offline.update(SILOS)

    def wire(self) -> Wire:
        return FlowerWire(self.grid, poll=0.01)

    def join(self, silo: str, handler: Handler) -> None:
        self.grid.handlers[silo] = handler
        self.grid.offline.discard(silo)

    def leave(self, silo: str) -> None:
        self.grid.offline.add(silo)

    def close(self) -> None:
        """There is nothing to stop."""


@dataclass
class DirectRig:
    """A hub and attendants, with certificates, TLS and folders as in a deployment, as threads of one process."""

    folder: Path
    said: list[str] = field(default_factory=list)
    attendants: dict[str, tuple[Attendant, threading.Thread]] = field(default_factory=dict)
    proxy: str = ""

    def __post_init__(self) -> None:
        address = f"127.0.0.1:{free_port()}"
        charter = Charter(name="x", address=address, silos=dict.fromkeys(SILOS, "all"), shape=(1,))
        self.server = ServerDirectory.create(
            self.folder / "server", charter, ServerSettings(listen=address), RoundRules()
        )
        self.homes = {}
        for silo in SILOS:
            home = SiloDirectory.create(self.folder / silo, Invitation.read(self.server.invitation(silo)))
            self.server.admit(home.public_key)
            self.homes[silo] = home
        self._short = tempfile.TemporaryDirectory(prefix="fedloom-")
        self.socket = Path(self._short.name) / "desk"
        self.start_server()

    def start_server(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.opened = OpenHub(self.server, self.socket, self.server.listening).__enter__()

    def stop_server(self) -> None:
        self.opened.__exit__()

    def restart_server(self) -> None:
        self.stop_server()
        self.start_server()

    def wire(self) -> DirectWire:
        return DirectWire("run-1", HubCalls(lambda: self.socket, 10.0), PartStore(self.server.post / "parts"))

    def attendant(self, silo: str) -> Attendant:
        home = self.homes[silo]
        home.post.mkdir(exist_ok=True)
        return Attendant(
            channel=Credentials(home, self.said.append, self.proxy).channel,
            mailbox=Mailbox(home.post / "mailbox.sqlite"),
            parts=PartStore(home.post / "parts"),
            silo=silo,
            facts={"version": "0", "device": "cpu"},
            largest=64 * 2**20,
            say=self.said.append,
        )

    def join(self, silo: str, handler: Handler) -> None:
        self.start(self.attendant(silo), handler)
        wait_for(lambda: silo in self.opened.hub.present(), f"silo '{silo}' attends")

    def start(self, attendant: Attendant, handler: Handler) -> None:
        def work() -> None:
            with contextlib.suppress(SystemExit, Killed):
                attendant.work(handler)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self.attendants[attendant.silo] = attendant, thread

    def leave(self, silo: str) -> None:
        attendant, thread = self.attendants.pop(silo)
        attendant.stop()
        thread.join(20)
        attendant.mailbox.close()
        wait_for(lambda: silo not in self.opened.hub.present(), f"silo '{silo}' is away")

    def close(self) -> None:
        for attendant, _ in self.attendants.values():
            attendant.stop()
        for _, thread in self.attendants.values():
            thread.join(20)
        self.stop_server()
        self._short.cleanup()


class Killed(BaseException):
    """Stands for a signal that no process outlives."""


class NVFlareRig:
    """A job's sites without NVFlare; each takes one task after the other."""

    def __init__(self, folder: Path) -> None:
        self.handlers: dict[str, Handler] = {}
        self.returns = dict.fromkeys(SILOS, 0)
        self.turns = {silo: threading.Lock() for silo in SILOS}

    def wire(self) -> Wire:
        return NVFlareWire(self, SILOS)

    def present(self) -> dict[str, int]:
        return {site: self.returns[site] for site in self.handlers} | {"a stranger": 0}

    def assign(self, site: str, frame: Frame, came: Came) -> Callable[[], None]:
        cancelled = threading.Event()

        def work() -> None:
            with self.turns[site]:
                if cancelled.is_set():
                    return
                try:
                    answer = self.handlers[site](Frame.of_bytes(frame.to_bytes()))
                    came(Frame.of_bytes(answer.to_bytes()), "")
                except Exception as error:
                    came(None, f"NVFlare says {error}")

        threading.Thread(target=work, daemon=True).start()
        return cancelled.set

    def join(self, silo: str, handler: Handler) -> None:
        self.handlers[silo] = handler

    def leave(self, silo: str) -> None:
        del self.handlers[silo]
        self.returns[silo] += 1

    def close(self) -> None:
        """There is nothing to stop."""


RIGS: dict[str, Callable[[Path], Rig]] = {"direct": DirectRig, "flower": FlowerRig, "nvflare": NVFlareRig}


@contextlib.contextmanager
def standing_rig(kind: str, folder: Path) -> Iterator[Rig]:
    found = RIGS[kind](folder)
    try:
        yield found
    finally:
        found.close()


class ConnectProxy:
    """An HTTP proxy that knows CONNECT alone; each of its connections may be cut after so many bytes to the server."""

    def __init__(self, cut_after: int = 0, cuts: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.targets: list[str] = []
        self.cut_after, self.cuts = cut_after, cuts
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += client.recv(1)
        method, target, _ = head.decode().split(" ", 2)
        assert method == "CONNECT"
        self.targets.append(target)
        host, _, port = target.rpartition(":")
        server = socket.create_connection((host, int(port)))
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        threading.Thread(target=self._pass, args=(server, client, 0), daemon=True).start()
        self._pass(client, server, self.cut_after)

    def _pass(self, source: socket.socket, target: socket.socket, cut_after: int) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                passed += len(data)
                if cut_after and self.cuts and passed > cut_after:
                    self.cuts -= 1
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
