"""``/healthz`` and ``/metrics`` of a process, on loopback alone.

Both look at what lies on disk and at checks that the process brings along, so they do not depend on any wire. Nothing
that is shown depends on a record: other users of the machine can reach a port of the loopback interface.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedloom.errors import FedloomError, MissingExtraError

try:
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtraError(f"metrics need the package '{error.name}'; pip install 'fedloom[direct]'") from error

LOOPBACK = "127.0.0.1"
Check = Callable[[], str]  # what is wrong; empty: nothing


@contextmanager
def watched(port: int, checks: Mapping[str, Check], collector: Collector) -> Iterator[int]:
    """Answer on a port of the loopback interface until the block ends; 0 takes any. Returns the port."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)

    class HealthAnswers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/healthz":
                found = problems(checks)
                body = json.dumps({"status": "unhealthy" if found else "ok", "problems": found}).encode()
                self._answer(503 if found else 200, "application/json", body)
            elif self.path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            else:
                self._answer(404, "text/plain", b"/healthz, /metrics\n")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Whoever scrapes is not worth a line."""

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), HealthAnswers)
    except OSError as error:
        raise FedloomError(
            f"port {port} of {LOOPBACK} cannot be had for health and metrics: {error.strerror}"
        ) from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


def problems(checks: Mapping[str, Check]) -> dict[str, str]:
    """What is wrong, by check; a check that fails itself has found something."""
    found = {}
    for name, check in checks.items():
        try:
            said = check()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if said:
            found[name] = said
    return found
