"""The SuperLink's outer door: who comes in, and that nothing is read of what the others bring."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import MutableMapping
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fedloom.deployment.proxy import LARGEST
from fedloom.deployment.superlink import Gate, TooMuchError

KEY, STRANGER = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
PIECE = 2**20


def signed(key: ec.EllipticCurvePrivateKey, moment: str = "", by: ec.EllipticCurvePrivateKey | None = None) -> dict:
    moment = moment or now().isoformat()
    return {
        "flwr-public-key": b64encode(public_key_to_bytes(key.public_key())).decode(),
        "flwr-timestamp": moment,
        "flwr-signature": b64encode(sign_message(by or key, moment.encode())).decode(),
    }


def called(
    headers: dict[str, str], path: str = "/v1/fleet/push-object", method: str = "POST", size: int = PIECE
) -> tuple[int, int]:
    """The status of an answer, and how many bytes of the body were read for it."""
    read, statuses = 0, list[int]()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> MutableMapping[str, Any]:
        nonlocal read
        read += PIECE
        return {"type": "http.request", "body": bytes(PIECE), "more_body": read < size}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {"type": "http", "method": method, "path": path}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    gate = Gate(application, lambda key: key == public_key_to_bytes(KEY.public_key()))
    asyncio.run(gate({**scope, "headers": raw}, receive, send))
    return statuses[0], read


def test_a_known_key_comes_in() -> None:
    assert called(signed(KEY)) == (200, PIECE)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (signed(STRANGER), 401),
        (signed(KEY, by=STRANGER), 401),
        (signed(KEY, "2020-01-01T00:00:00+00:00"), 401),
        ({**signed(KEY), "flwr-signature": "#"}, 401),
        ({**signed(KEY), "flwr-timestamp": "noon"}, 401),
        ({**signed(KEY), "content-length": str(LARGEST + 1)}, 413),
        ({**signed(KEY), "content-length": "many"}, 413),
    ],
)
def test_nothing_is_read_of_a_call_that_does_not_come_in(headers: dict[str, str], status: int) -> None:
    assert called(headers) == (status, 0)


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/control/start-run", "POST"),
        ("/v1/runtime/acquire-task", "POST"),
        ("/v1/fleet/register-node", "POST"),
        ("/v1/fleet/get-fab", "POST"),
        ("/health", "GET"),
        ("/v1/fleet/push-object", "GET"),
    ],
)
def test_not_even_a_known_key_may_call_anything_else(path: str, method: str) -> None:
    assert called(signed(KEY), path, method) == (404, 0)


def test_a_body_that_is_larger_than_announced_is_cut_off() -> None:
    with pytest.raises(TooMuchError):
        called({**signed(KEY), "content-length": str(PIECE)}, size=LARGEST + 2 * PIECE)
