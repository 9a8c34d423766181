"""The SuperLink's inner door: control and run calls go through a socket in a folder that its owner alone can enter.

Flower asks nobody who calls there for a key, so nothing of it listens on a port, not even on loopback, where every user
of a machine could knock.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.retry import make_simple_http_retry_invoker

ClientT = TypeVar("ClientT", bound=ProtobufClient)


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
