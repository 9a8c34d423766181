"""The SuperLink's inner door: control and run calls go through a socket in a folder that its owner alone can enter.

Flower asks nobody who calls there for a key, so nothing of it listens on a port, not even on loopback, where every user
of a machine could knock.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.retry import make_simple_http_retry_invoker

from fedloom.runs.files import write_atomically

ClientT = TypeVar("ClientT", bound=ProtobufClient)


class Door:
    """Where a federation's server is reached on its own machine; known by a file in the server's folder."""

    def __init__(self, note: Path) -> None:
        self._note = note

    def make(self) -> Path:
        """A new place for the socket; its name must be short, which that of the server's folder need not be."""
        folder = Path(tempfile.mkdtemp(prefix="fedloom-"))  # for its owner alone
        write_atomically(self._note, str(folder).encode())
        return folder / "superlink"

    def remove(self) -> None:
        """Remove the folder of the socket, and the note of where it is."""
        if self._note.is_file():
            shutil.rmtree(self._note.read_text(encoding="utf-8"), ignore_errors=True)
            self._note.unlink()

    @property
    def socket(self) -> Path | None:
        """Where the SuperLink listens, if it does."""
        return Path(self._note.read_text(encoding="utf-8")) / "superlink" if self._note.is_file() else None


def through(
    kind: type[ClientT], socket: Path, component: str, timeout: float, *identity: Any, patient: bool = False
) -> ClientT:
    """One of Flower's clients, whose calls go through the socket; a patient one waits for a server that is away."""
    interceptors: Sequence[Any] = (RuntimeVersionHttpInterceptor(component_name=component), *identity)
    again = make_simple_http_retry_invoker() if patient else None
    client = kind("http://superlink", interceptors=interceptors, retry_invoker=again)
    client._client.close()
    client._client = httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=timeout)
    return client
