"""Flower's SuperLink behind two doors: a port for silos, who show a key, and for all else a socket of the owner's.

Who comes to the port is known before a byte of what he brings is read: Flower itself reads the whole of it first.
"""

from __future__ import annotations

import binascii
import datetime
import importlib
import sys
import threading
from base64 import b64decode
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

from fedloom.deployment.proxy import FLEET, LARGEST

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
CALLS = {f"/v1/fleet/{call}" for call in FLEET}


class TooMuchError(ValueError):
    """A peer sends more than it announced, or than is allowed."""


class Gate:
    """Lets through the calls that a silo needs, of keys that are known, no larger than a piece of a message."""

    def __init__(self, application: Application, known: Callable[[bytes], bool]) -> None:
        self._application, self._known = application, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call."""
        refused = self._refused(scope)
        if refused:
            headers = [(b"content-length", b"0"), (b"connection", b"close")]  # what he goes on sending is not read
            await send({"type": "http.response.start", "status": refused, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        read = 0

        async def bounded() -> MutableMapping[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > LARGEST:
                raise TooMuchError(f"a call is larger than {LARGEST} bytes")
            return message

        await self._application(scope, bounded, send)

    def _refused(self, scope: Scope) -> int:
        """The status for a call that does not come in; 0 for one that does."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope.get("headers", ())}
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in CALLS:
            return 404
        if not self._signed(headers):
            return 401
        length = headers.get("content-length", "0")
        return 0 if length.isdigit() and int(length) <= LARGEST else 413

    def _signed(self, headers: dict[str, str]) -> bool:
        """Whether the caller has just now shown one of the keys that are known."""
        try:
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            moment = headers[TIMESTAMP_HEADER]
            age = (now() - datetime.datetime.fromisoformat(moment)).total_seconds()
            fresh = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
            return fresh and self._known(key) and verify_signature(bytes_to_public_key(key), moment.encode(), signature)
        except (KeyError, ValueError, TypeError, binascii.Error):
            return False


def serve(config: Any, door: Path) -> None:
    """Both doors, until told to stop; in place of Flower's own one for everybody."""
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.main import create_app

    application = create_app(config, SuperLinkLifespan)
    state = application.state.linkstate_factory.state()
    gate = Gate(application, lambda key: state.get_node_id_by_public_key(key) is not None)
    outer = uvicorn.Server(
        uvicorn.Config(
            gate,
            host=config.host,
            port=config.port,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            lifespan="off",
            log_level="warning",
        )
    )
    inner = uvicorn.Server(uvicorn.Config(application, uds=str(door), log_level="warning"))
    threading.Thread(target=outer.run, daemon=True).start()
    inner.run()
    outer.should_exit = True


def main(*arguments: str) -> None:
    """As ``flower-superlink``, whose arguments follow the socket's path."""
    door, *flower = arguments
    command = importlib.import_module("flwr.superlink.cli.flower_superlink")
    command._run_superlink_http_api = lambda lifespan_config: serve(lifespan_config, Path(door))  # type: ignore[attr-defined]
    sys.argv = ["flower-superlink", *flower]
    command.flower_superlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
