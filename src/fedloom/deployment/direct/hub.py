"""Where silos and runs meet: orders go out to silos that attend, answers come in, and both stay on disk.

Silos call, by the five calls below; nobody calls a silo. Nothing here needs torch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import grpc

from fedloom.deployment.direct.letters import Letter, WireError, content_of_text, digest_in, size_in, sizes_of, text_of
from fedloom.deployment.direct.mailbox import OPEN, Mailbox
from fedloom.deployment.direct.parts import PartStore
from fedloom.deployment.direct.register import NotAdmittedError, Peer, Register
from fedloom.deployment.direct.transport import ATTEND, CERTIFY, FETCH, OFFER, SEND, Call
from fedloom.errors import FedloomError

CALLS = 6  # of one silo at once: it attends and does one thing more, and old connections may linger
BEAT = 2.0  # seconds between two looks whether a silo may still attend, and signs of life
STAY = 6 * 3600.0  # seconds after which a silo comes anew, with the newest certificate that it can have
ORDER, WITHDRAWN, ALIVE = "order", "withdrawn", "alive"  # notices


@dataclass(frozen=True)
class Visit:
    """One call of a silo's."""

    peer: Peer
    requests: Iterator[bytes]
    context: grpc.ServicerContext

    def first(self) -> bytes:
        """The text that a call begins with."""
        for request in self.requests:
            return request
        raise WireError("a call says nothing")


Method = Callable[[Visit], Iterator[bytes]]


@dataclass(eq=False)
class Presence:
    """A silo that attends."""

    instance: str  # which of the silo's processes it is
    facts: dict[str, Any]
    since: float = field(default_factory=time.time)
    notices: queue.SimpleQueue[bytes] = field(default_factory=queue.SimpleQueue)  # that it has not been told

    @property
    def number(self) -> int:
        """Another for each process of the silo."""
        return int(sha256(self.instance.encode()).hexdigest()[:12], 16)

    def tell(self, notice: str, letter: str) -> None:
        """Put a notice into its hands soon."""
        self.notices.put(text_of({"notice": notice, "letter": letter}))


class Hub:
    """The server's half of the wire."""

    def __init__(self, register: Register, mailbox: Mailbox, parts: PartStore) -> None:
        self._register, self._mailbox, self._parts = register, mailbox, parts
        self._present: dict[str, Presence] = {}
        self._offered: dict[str, dict[str, int]] = {}  # by silo: what it may send now, and how long that is
        self._calling: Counter[str] = Counter()  # calls under way, by silo
        self._lock = threading.Lock()
        self.answered = threading.Condition()
        parts.sweep(mailbox.named)

    def calls(self) -> dict[str, Call]:
        """What silos may call, each by whom it is for."""
        members = {ATTEND: self._attend, FETCH: self._fetch, OFFER: self._offer, SEND: self._send}
        guarded = {name: self._guarded(method, invited=False) for name, method in members.items()}
        return {**guarded, CERTIFY: self._guarded(self._certify, invited=True)}

    def present(self) -> dict[str, Presence]:
        """The silos that attend."""
        with self._lock:
            return dict(self._present)

    def order(self, silo: str, run: str, round: int, letter: Letter) -> Letter:
        """Keep an order for a silo, and tell it unless it has answered; one that failed is open again."""
        self._mailbox.forget_done(silo, run, round - 1)
        kept = self._mailbox.put(silo, run, round, letter)
        state, presence = self._mailbox.state(letter.number), self.present().get(silo)
        if presence and state and state[0] == OPEN:
            presence.tell(ORDER, kept.to_bytes().decode())
        return kept

    def answers(self, numbers: list[str], seconds: float) -> list[Letter]:
        """The answers to some of the orders; waits so long for the first."""
        end = time.monotonic() + seconds
        while True:
            with self.answered:
                found = self._mailbox.answers(numbers)
                if found or time.monotonic() > end:
                    return found
                self.answered.wait(max(0.0, min(seconds, end - time.monotonic())))

    def took(self, numbers: list[str]) -> None:
        """A run has the answers; they stay for one that goes on in its place, until a later round."""
        self._mailbox.done(*numbers)

    def finished(self, run: str) -> None:
        """A run is over, and nothing of it is asked for any more."""
        self._mailbox.forget_run(run)
        self._parts.sweep(self._mailbox.named)

    def withdraw(self, numbers: list[str]) -> None:
        """Strike out orders; their silos are told."""
        for number in numbers:
            silo = self._mailbox.silo_of(number)
            self._mailbox.forget(number)
            if presence := self.present().get(silo):
                presence.tell(WITHDRAWN, number)
        self._parts.sweep(self._mailbox.named)

    def _guarded(self, method: Method, *, invited: bool) -> Call:
        """A method for those who may call it: who it is is settled before a byte of what he brings is read."""

        def call(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            try:
                peer = self._register.peer(context.auth_context())
                if peer.invited and not invited:
                    raise NotAdmittedError("an invitation is for asking to be admitted, and for nothing else")
                with self._counted(peer.silo):
                    yield from method(Visit(peer, requests, context))
            except NotAdmittedError as error:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
            except WireError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except FedloomError as error:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

        return call

    @contextmanager
    def _counted(self, silo: str) -> Iterator[None]:
        """A silo that calls too often at once keeps no other's thread."""
        with self._lock:
            if self._calling[silo] >= CALLS:
                raise NotAdmittedError(f"silo '{silo}' has {CALLS} calls under way already")
            self._calling[silo] += 1
        try:
            yield
        finally:
            with self._lock:
                self._calling[silo] -= 1

    def _attend(self, visit: Visit) -> Iterator[bytes]:
        hello = content_of_text(visit.first(), instance=str, version=str, device=str)
        peer, presence = visit.peer, self._enter(visit.peer.silo, hello)
        visit.context.add_callback(lambda: presence.tell(ALIVE, ""))  # it is gone: whoever waits here is to look
        end = time.monotonic() + STAY
        try:
            presence.tell(ALIVE, "")
            while visit.context.is_active() and time.monotonic() < end:
                self._register.check(peer)
                try:
                    yield presence.notices.get(timeout=BEAT)
                except queue.Empty:
                    presence.tell(ALIVE, "")
        finally:
            self._leave(peer.silo, presence)

    def _enter(self, silo: str, hello: dict[str, Any]) -> Presence:
        instance = hello.pop("instance")
        presence = Presence(instance, hello)
        with self._lock:
            before = self._present.get(silo)
            if before and before.instance != instance:
                raise NotAdmittedError(f"silo '{silo}' has joined already, by another process")
            self._present[silo] = presence
        for letter in self._mailbox.open(silo):
            presence.tell(ORDER, letter.to_bytes().decode())
        return presence

    def _leave(self, silo: str, presence: Presence) -> None:
        with self._lock:
            if self._present.get(silo) is presence:
                del self._present[silo]

    def _fetch(self, visit: Visit) -> Iterator[bytes]:
        """A part of an order of the silo's own, from an offset on."""
        asked = content_of_text(visit.first(), number=str, sha256=str, offset=int)
        number, digest = digest_in(asked["number"]), digest_in(asked["sha256"])
        if self._mailbox.silo_of(number) != visit.peer.silo or not self._mailbox.names(number, digest):
            raise WireError("this part is of no order of this silo")
        yield from self._parts.chunks(digest, size_in(asked["offset"]))

    def _offer(self, visit: Visit) -> Iterator[bytes]:
        """An answer, without its bytes: what of those is wanted, and from where on; none once all of them are here."""
        letter = Letter.of_bytes(visit.first())
        if self._mailbox.silo_of(letter.number) not in ("", visit.peer.silo):
            raise WireError("this order is not this silo's")
        known = self._mailbox.state(letter.number)
        if known is None or known[0] != OPEN or known[1].attempt != letter.attempt:
            yield text_of({"settled": True, "wanted": {}})
            return
        if letter.size > known[1].limit:
            raise WireError(f"an answer has {letter.size} bytes; {known[1].limit} are allowed")
        sizes = sizes_of(letter.parts)
        lacking = {digest: size for digest, size in sizes.items() if not self._parts.has(digest, size)}
        before = self._offered.get(visit.peer.silo, {})
        self._parts.drop(set(before) - set(sizes), visit.peer.silo, self._mailbox.named)
        self._offered[visit.peer.silo] = sizes
        if not lacking:
            with self.answered:
                self._mailbox.answer(letter)
                self.answered.notify_all()
        wanted = {digest: self._parts.had(digest, visit.peer.silo) for digest in lacking}
        yield text_of({"settled": not lacking, "wanted": wanted})

    def _send(self, visit: Visit) -> Iterator[bytes]:
        """The bytes of a part that was offered, written while they come."""
        told = content_of_text(visit.first(), sha256=str, offset=int)
        digest = digest_in(told["sha256"])
        size = self._offered.get(visit.peer.silo, {}).get(digest)
        if size is None:
            raise WireError("this part was not offered")
        offset = size_in(told["offset"])
        yield text_of({"had": self._parts.receive(digest, size, offset, visit.requests, visit.peer.silo)})

    def _certify(self, visit: Visit) -> Iterator[bytes]:
        line = str(content_of_text(visit.first(), key=str)["key"]).encode()
        if len(line) > 1024 or line.count(b" ") != 1 or b"\n" in line:
            raise WireError("this is no public key")
        yield text_of({"certificate": self._register.certificate(visit.peer, line)})
