"""Connections that ask for nothing do not keep others out."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fedloom.studio import server
from studio.serving import Running, serving
from support import wait_for

TOKEN = "a-token-that-is-long-enough"
WHOLE = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
STREAM = b"GET /events HTTP/1.1\r\nHost: localhost\r\n" + f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
PATIENCE = 0.3  # seconds


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(server, "REQUEST_TIME", PATIENCE)
    with serving(tmp_path, TOKEN) as running:
        yield running


def called(running: Running, sent: bytes = b"") -> socket.socket:
    """A connection over which something is sent as soon as it is there."""
    with running.held():
        connection = socket.create_connection(("127.0.0.1", running.port), timeout=60)
        connection.sendall(sent)
    return connection


def answers(connection: socket.socket) -> bytes:
    """All that comes until the other side closes; a time-out where it does not."""
    found = b""
    while more := connection.recv(65_536):
        found += more
    return found


@pytest.mark.parametrize(
    ("sent", "answered"),
    [(b"", 0), (b"G", 0), (WHOLE, 0), (WHOLE + b"\r\n" + WHOLE, 1), (WHOLE + b"Content-Length: 9\r\n\r\n", 1)],
    ids=["nothing", "a letter", "half of the headers", "half of a second request", "a body that never comes"],
)
def test_a_connection_that_asks_for_nothing_whole_is_closed(impatient: Running, sent: bytes, answered: int) -> None:
    with called(impatient, sent) as connection:
        assert answers(connection).count(b"HTTP/1.1 ") == answered


def test_one_that_is_being_answered_stays(impatient: Running) -> None:
    with called(impatient, STREAM) as connection:
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 OK")
        wait_for(lambda: impatient.server.studio.watch.watchers == 1)
        time.sleep(3 * PATIENCE)
        assert impatient.server.studio.watch.watchers == 1


def test_silent_connections_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest for the newest, however much time they have; one that is being answered stays."""
    monkeypatch.setattr(server, "REQUEST_TIME", 1e6)
    with serving(tmp_path, TOKEN) as running, ExitStack() as held:

        def connection(sent: bytes = b"") -> socket.socket:
            return held.enter_context(called(running, sent))

        stream = connection(STREAM)
        assert stream.recv(65_536).startswith(b"HTTP/1.1 200 OK")
        silent = [connection() for _ in range(2 * server.MOST_CONNECTIONS)]
        late = connection(WHOLE + b"Connection: close\r\n\r\n")
        assert answers(late)[9:12] == b"401"
        assert answers(silent[0]) == b""
        silent[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            answers(silent[-1])
        wait_for(lambda: running.server.studio.watch.watchers == 1)
        assert len(running.server.server_state.connections) < server.MOST_CONNECTIONS
