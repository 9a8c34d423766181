"""gRPC as the direct wire uses it: both sides with a certificate, messages of bounded size, silence noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fedloom.deployment.direct.letters import TEXT
from fedloom.errors import MissingExtraError

try:
    import grpc
except ModuleNotFoundError as error:
    raise MissingExtraError(f"a federation needs the package '{error.name}'; pip install 'fedloom[direct]'") from error

SERVICE = "fedloom.Direct"
ATTEND, FETCH, OFFER, SEND, CERTIFY = "Attend", "Fetch", "Offer", "Send", "Certify"
ROOM = 64 * 1024  # bytes of a message beside its text or piece
PULSE, SILENCE = 10_000, 5_000  # milliseconds between two signs of life, and without an answer to one
OPTIONS = (
    ("grpc.max_receive_message_length", TEXT + ROOM),
    ("grpc.max_send_message_length", TEXT + ROOM),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.keepalive_time_ms", PULSE),
    ("grpc.keepalive_timeout_ms", SILENCE),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER = (
    ("grpc.so_reuseport", 0),  # two servers at one port would share the silos
    ("grpc.max_concurrent_streams", 8),
    ("grpc.http2.min_ping_interval_without_data_ms", PULSE // 2),
)
CLIENT = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    ("grpc.enable_retries", 0),  # what is tried again is decided here
)

Call = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


def make_server(calls: dict[str, Call], threads: int) -> grpc.Server:
    """A server of calls whose every message is bytes; no call has a body that is read before it begins."""
    server = grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="call"),
        options=(*OPTIONS, *SERVER),
        maximum_concurrent_rpcs=threads,
    )
    handlers = {name: grpc.stream_stream_rpc_method_handler(call) for name, call in calls.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    return server


def server_credentials(key: bytes, certificate: bytes, authority: bytes) -> grpc.ServerCredentials:
    """A server's, which talks with nobody who has no certificate of the authority."""
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)


def open_channel(address: str, authority: bytes, key: bytes, certificate: bytes, proxy: str = "") -> grpc.Channel:
    """A silo's way to the server; by an HTTP proxy's CONNECT where one is named, here or in ``https_proxy``."""
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    options: list[tuple[str, Any]] = [*OPTIONS, *CLIENT]
    if proxy:
        options.append(("grpc.http_proxy", proxy))
    return grpc.secure_channel(address, credentials, options=options)


def call(channel: grpc.Channel, name: str, requests: Iterator[bytes], timeout: float | None = None) -> Any:
    """What comes back of a call, message by message."""
    try:
        return channel.stream_stream(f"/{SERVICE}/{name}")(requests, timeout=timeout)
    except ValueError as error:  # whoever attends has closed it, and opens another
        raise ConnectionError("the channel is closed") from error
