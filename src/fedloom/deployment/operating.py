"""What surrounds a server or a silo that runs, whichever wire it speaks: logs, health, metrics, warnings of expiry."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from fedloom.deployment.directories import SiloDirectory
from fedloom.deployment.expiry import warnings_of
from fedloom.deployment.processes import Child
from fedloom.deployment.vitals import Home, Pulse, Vitals, checks_of
from fedloom.operations.health import Check, watched
from fedloom.operations.logs import logged
from fedloom.operations.relay import Relay

log = logging.getLogger("fedloom.federation")
DAY = 24 * 3600.0


@dataclass
class Operation:
    """A process under way."""

    home: Home
    speak: Callable[[str], None]
    checks: dict[str, Check]
    pulse: Pulse
    relays: dict[str, tuple[Relay, Child]] = field(default_factory=dict)
    _warned: float = field(default=-DAY)

    def say(self, text: str) -> None:
        """To whoever sits there, and into the log."""
        self.speak(text)
        log.info("%s", text)

    def watch(self, children: Sequence[Child]) -> None:
        """Let ``/healthz`` look at processes, too, and the log hear what they say."""
        self.checks["processes"] = partial(_dead, children)
        self.relays = {child.name: (Relay(child.name, child.log, child.heard), child) for child in children}

    def beat(self) -> None:
        """The loop went round; once a day it says which certificates end soon."""
        self.pulse.beat()
        for relay, child in self.relays.values():
            if relay.pass_on():
                child.heard = 0
        if time.monotonic() - self._warned >= DAY:
            self._warned = time.monotonic()
            for warning in warnings_of(self.home.path):
                self.speak(warning)
                log.warning("%s", warning, extra={"event": "expiry"})


def _dead(children: Sequence[Child]) -> str:
    gone = [child.name for child in children if child.process is None or child.process.poll() is not None]
    return f"not running, and started again soon: {', '.join(gone)}" if gone else ""


@contextmanager
def operated(home: Home, speak: Callable[[str], None], port: int | None) -> Iterator[Operation]:
    """With a log from the first to the last word, and health and metrics where a port is given."""
    pulse = Pulse()
    checks = checks_of(home, pulse) | {"processes": lambda: "not started yet"}
    operation = Operation(home, speak, checks, pulse)
    with ExitStack() as stack:
        stack.enter_context(logged(home.logs, home.name if isinstance(home, SiloDirectory) else ""))
        log.info("started", extra={"event": "started"})
        stack.callback(lambda: log.info("stopped", extra={"event": "stopped"}))
        if port is not None:
            found = stack.enter_context(watched(port, operation.checks, Vitals(home)))
            operation.say(f"health and metrics: http://127.0.0.1:{found}/healthz and /metrics")
        operation.beat()
        yield operation
