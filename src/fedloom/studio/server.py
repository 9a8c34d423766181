"""Serving the studio: an address, a token where others can reach it, and a quiet end."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from fedloom.errors import ConfigError
from fedloom.studio.app import make_app
from fedloom.studio.gate import LARGEST_HEADERS, Admission
from fedloom.studio.records import FLAG
from fedloom.studio.studio import Studio

SHORTEST_TOKEN = 16
MOST_CONNECTIONS = 128
REQUEST_TIME = 10.0  # seconds within which a connection must have sent a whole request


@dataclass(frozen=True)
class Listener:
    """Where the studio listens, and for whom it opens."""

    listener: socket.socket
    door: Admission

    @classmethod
    def of(cls, host: str, port: int, token: str, works: bool = False, with_records: bool = False) -> Listener:
        """Take the address; elsewhere than on loopback, for work and for records, there is always a token."""
        listener = _listener(host, port)
        loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        if token and len(token) < SHORTEST_TOKEN:
            raise ConfigError(f"--token has {len(token)} characters; it must have at least {SHORTEST_TOKEN}")
        alone = "--work" if works else FLAG if with_records else ""
        if alone and not loopback:
            listener.close()
            raise ConfigError(f"{alone} is for this machine alone, and --host {host} lets others in; leave out one")
        if alone or not loopback:
            token = token or secrets.token_urlsafe(32)
        names = {"localhost"} if loopback else {"localhost", host, socket.gethostname(), socket.getfqdn()}
        door = Admission(
            frozenset(name.lower() for name in names),
            any_address=not loopback,
            token=token,
            cookie=f"fedloom-studio-{listener.getsockname()[1]}",  # cookies do not tell ports apart
            works=works,
        )
        return cls(listener, door)

    @property
    def address(self) -> str:
        """What a person opens."""
        host, port = self.listener.getsockname()[:2]
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
        query = f"?token={self.door.token}" if self.door.token else ""
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/{query}"


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # whoever opens the address as soon as it is printed waits, and is not turned away
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen at --host {host} --port {port}: {why}") from error
    return listener


class TimedConnection(H11Protocol):
    """Ends when nothing whole is asked for: silent connections would keep everybody else out, token or not."""

    _numbers = count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to count; where all places are taken, the oldest that is not being answered goes."""
        super().connection_made(transport)
        self._number = next(self._numbers)  # a clock does not tell apart those that come together
        idle = [
            each for each in self.connections if isinstance(each, TimedConnection) and each is not self and each.idle
        ]
        if idle and len(self.connections) >= MOST_CONNECTIONS:  # with so many, requests are turned away
            oldest = min(idle, key=lambda each: each._number)
            oldest.transport.close()
            self.connections.discard(oldest)  # at once: its transport may take its time
        self._wait(None)

    @property
    def idle(self) -> bool:
        """Whether nothing is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self, answered: RequestResponseCycle | None) -> None:
        self.loop.call_later(REQUEST_TIME, self._check, answered)

    def _check(self, answered: RequestResponseCycle | None) -> None:
        """Close, if the last request is answered and has been the last for all this time."""
        if self.idle and self.cycle is answered:
            self.transport.close()
        elif not self.transport.is_closing():
            self._wait(self.cycle)


class Server(uvicorn.Server):
    """Ends streams that would never end by themselves."""

    def __init__(self, config: uvicorn.Config, studio: Studio) -> None:
        super().__init__(config)
        self.studio = studio

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On Ctrl-C."""
        self.studio.watch.closed = True
        super().handle_exit(sig, frame)


def server_of(studio: Studio, door: Admission) -> Server:
    """A server that knows its limits."""
    config = uvicorn.Config(
        make_app(studio, door),
        http=TimedConnection,
        ws="none",
        log_level="error",
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=LARGEST_HEADERS,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )
    return Server(config, studio)


def serve(
    folder: Path,
    papers: Path,
    host: str,
    port: int,
    token: str,
    open_browser: bool,
    say: Callable[[str], None],
    works: bool = False,
    with_records: bool = False,
) -> None:
    """Serve a runs folder until somebody ends it; ``papers`` holds result files of papers' tables."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder '{folder}'; name the folder that your runs lie in")
    place = Listener.of(host, port, token, works, with_records)
    studio = Studio.over(folder, papers, works, with_records)
    torch.set_num_threads(1)  # frames are small: more threads make them slower
    say(f"The studio of {studio.catalogue.root} is at {place.address}")
    say("Ctrl-C ends it.")
    if open_browser:
        threading.Timer(0.5, webbrowser.open, [place.address]).start()
    try:
        server_of(studio, place.door).run(sockets=[place.listener])
    finally:
        place.listener.close()
