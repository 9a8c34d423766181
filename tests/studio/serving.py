"""A studio that answers over a real connection, in a thread of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedloom.studio.server import Listener, Server, server_of
from fedloom.studio.studio import Studio
from support import wait_for


@dataclass(frozen=True)
class Running:
    """A studio that answers."""

    root: Path
    address: str
    port: int
    server: Server

    def key(self, name: str) -> str:
        """Of a run, by its name."""
        entries = self.server.studio.catalogue.entries().values()
        return next(entry.key for entry in entries if entry.name == name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """It does nothing meanwhile, so that no time of its own passes, however slow whoever calls it is."""
        go_on = threading.Event()
        self.server.servers[0].get_loop().call_soon_threadsafe(go_on.wait)
        try:
            yield
        finally:
            go_on.set()


@contextmanager
def serving(root: Path, token: str = "", works: bool = False) -> Iterator[Running]:
    """A studio in a thread of this process."""
    place = Listener.of("127.0.0.1", 0, token, works)
    server = server_of(Studio.over(root, root.parent / "papers", works), place.door)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place.listener]})
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield Running(root, place.address, place.listener.getsockname()[1], server)
    finally:
        server.handle_exit(2, None)
        thread.join(timeout=60)
        place.listener.close()
    assert not thread.is_alive(), "streams that are open must not keep the studio from ending"
