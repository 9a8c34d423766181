"""The silo's half of the wire: it calls the server, keeps what it is asked and what it answers, and works through it.

Nobody calls it, and nothing that a server sends is run, unpacked or used as a path: an order is a header and parts,
which go to whoever answers them.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from fedloom.deployment.direct.hub import ALIVE, ORDER, WITHDRAWN
from fedloom.deployment.direct.letters import (
    Letter,
    WireError,
    content_of_text,
    digest_in,
    size_in,
    sizes_of,
    text_of,
)
from fedloom.deployment.direct.mailbox import DONE, Mailbox
from fedloom.deployment.direct.parts import PartStore
from fedloom.deployment.direct.transport import ATTEND, FETCH, OFFER, SEND, call
from fedloom.engines.remote.frames import Frame
from fedloom.errors import FedloomError

log = logging.getLogger(__name__)
SENDER = "server"  # of whom parts come
OFFERS = 5  # of an answer whose parts are not taken
CALL = 60.0  # seconds that a short call may take
PAUSES = (0.2, 0.5, 1.0, 1.5, 2.0)  # seconds between tries to reach the server
TURNED_AWAY = grpc.StatusCode.PERMISSION_DENIED
LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)

Answering = Callable[[Frame], Frame]


class NotTakenError(FedloomError):
    """The server does not want what a call brings, or knows nothing of what it asks for."""


@dataclass
class Attendant:
    """A silo's post: orders come in while a connection lasts, and answers leave whenever there is one."""

    channel: Callable[[], grpc.Channel]  # a new way to the server, with the newest certificate
    mailbox: Mailbox
    parts: PartStore
    silo: str
    facts: dict[str, str]  # that the server is told
    largest: int  # bytes of an order
    say: Callable[[str], None] = log.warning
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    connected: threading.Event = field(default_factory=threading.Event)
    _news: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _way: grpc.Channel | None = None
    _said: str = ""

    def work(self, answering: Answering) -> None:
        """Attend and answer one order after the other, until told to stop."""
        self.parts.sweep(self.mailbox.named, older=0.0)
        listener = threading.Thread(target=self._listen, daemon=True)
        listener.start()
        while not self._over.is_set():
            self._news.clear()
            for letter in self.mailbox.answered():
                self._deliver(letter)
            while (orders := self.mailbox.open(self.silo)) and not self._over.is_set():
                self._answer(orders[0], answering)
            self._news.wait(1.0)

    def stop(self) -> None:
        """Let :meth:`work` end after the order that is under way."""
        self._over.set()
        self._news.set()
        if self._way is not None:
            self._way.close()

    def _answer(self, letter: Letter, answering: Answering) -> None:
        try:
            order = self._fetched(letter)
        except NotTakenError:
            self.mailbox.forget(letter.number)
            return
        except FedloomError as error:
            self.say(f"an order is not taken: {error}")
            answer = _failure(str(error))
        else:
            answer = self._made(order, answering)
        if answer.size > letter.limit:
            self.say(f"an answer has {answer.size} bytes; the server asks for at most {letter.limit}")
            answer = _failure(f"the answer of silo '{self.silo}' is longer than was asked for")
        self.parts.keep(answer)
        told = letter.answer(answer)
        if self.mailbox.answer(told):  # it may have been withdrawn meanwhile
            self._deliver(told)

    def _made(self, order: Frame, answering: Answering) -> Frame:
        try:
            return answering(order)
        except Exception as error:  # whatever a server sends, it gets an answer, and the next order is looked at
            self.say(f"no answer: {error}")
            return _failure(str(error) if isinstance(error, FedloomError) else f"silo '{self.silo}' failed")

    def _fetched(self, letter: Letter) -> Frame:
        """The order with its parts; those that are here from before are not fetched again."""
        for digest, size in sizes_of(letter.parts).items():
            while not self.parts.has(digest, size):
                self._patiently(partial(self._fetch, letter.number, digest, size))
        return letter.frame(self.parts.read({part.sha256 for part in letter.parts}))

    def _fetch(self, number: str, digest: str, size: int) -> None:
        offset = self.parts.had(digest, SENDER)
        asked = text_of({"number": number, "sha256": digest, "offset": offset})
        chunks = call(self._channel, FETCH, iter([asked]))
        self.parts.receive(digest, size, offset, chunks, SENDER)

    def _deliver(self, letter: Letter) -> None:
        """Offer an answer until the server has all of it, or wants it no more."""
        refused = 0
        try:
            while wanted := self._patiently(partial(self._offered, letter)):
                try:
                    for digest, offset in wanted.items():
                        self._patiently(partial(self._send, digest, offset))
                except NotTakenError:  # a server that was started again is offered it once more
                    refused += 1
                    if refused == OFFERS:
                        raise
        except (NotTakenError, WireError) as error:
            self.say(f"an answer is not taken: {error}")
        self.mailbox.forget_all_done()
        self.mailbox.done(letter.number)
        self.parts.sweep(self.mailbox.named, older=0.0)

    def _offered(self, letter: Letter) -> dict[str, int]:
        """What the server wants of an answer, and from where on; empty once it has all."""
        said = content_of_text(self._short(OFFER, letter.to_bytes()), settled=bool, wanted=dict)
        return {} if said["settled"] else {digest_in(key): size_in(value) for key, value in said["wanted"].items()}

    def _send(self, digest: str, offset: int) -> None:
        def pieces() -> Iterator[bytes]:
            yield text_of({"sha256": digest, "offset": offset})
            yield from self.parts.chunks(digest, offset)

        for _ in call(self._channel, SEND, pieces()):
            pass

    def _short(self, name: str, text: bytes) -> bytes:
        for said in call(self._channel, name, iter([text]), CALL):
            return bytes(said)
        raise WireError("the server says nothing")

    @property
    def _channel(self) -> grpc.Channel:
        if self._way is None:
            raise ConnectionError
        return self._way

    def _patiently(self, attempt: Callable[[], Any]) -> Any:
        """What comes of an attempt; while there is no connection, it is made again."""
        number = 0
        while not self._over.is_set():
            try:
                return attempt()
            except ConnectionError:
                pass
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise NotTakenError(str(error.details())) from error
                if error.code() not in LOST:
                    self._tell_once(_trouble(error))
            time.sleep(PAUSES[min(number, len(PAUSES) - 1)])
            number += 1
        raise SystemExit(0)

    def _listen(self) -> None:
        """Attend, and again whenever the connection is lost; what keeps us from it is said once."""
        number = 0
        while not self._over.is_set():
            try:
                with self.channel() as way:
                    self._way = way
                    self._attend(way)
            except grpc.RpcError as error:
                self._tell_once(_trouble(error))
            except FedloomError as error:
                self._tell_once(str(error))
            except Exception as error:  # a connection is made anew whatever went wrong with the last one
                if not self._over.is_set():
                    self._tell_once(f"the connection was lost: {type(error).__name__}: {error}")
            number = 0 if self.connected.is_set() else number + 1
            self.connected.clear()
            self._over.wait(PAUSES[min(number, len(PAUSES) - 1)])

    def _attend(self, way: grpc.Channel) -> None:
        stay = threading.Event()
        hello = text_of({"instance": self.instance, **self.facts})

        def requests() -> Iterator[bytes]:
            yield hello
            stay.wait()

        try:
            for data in call(way, ATTEND, requests()):
                self._hear(data)
        finally:
            stay.set()

    def _hear(self, data: bytes) -> None:
        said = content_of_text(data, notice=str, letter=str)
        if not self.connected.is_set():
            self._said = ""
            self.connected.set()
            log.info("connected")
        if said["notice"] == ORDER:
            self._order(Letter.of_bytes(said["letter"].encode()))
        elif said["notice"] == WITHDRAWN:
            self.mailbox.forget(digest_in(said["letter"]))
        elif said["notice"] != ALIVE:
            raise WireError("the server sends a notice that this version does not know")

    def _order(self, letter: Letter) -> None:
        """A new order is kept; one that was answered is not worked at again, unless the server counts a new attempt."""
        if letter.size > self.largest:
            raise WireError(f"the server sends an order of {letter.size} bytes; {self.largest} are allowed")
        known = self.mailbox.state(letter.number)
        if known is not None and known[1].attempt >= letter.attempt:
            state, _, answer = known
            if state != DONE:
                return
            if answer is not None and answer.kind != "failed":
                # It was on its way when the server took the answer, or the server has lost that: offer it once more.
                self.mailbox.undone(letter.number)
                self._news.set()
                return
        self.mailbox.replace(self.silo, letter)
        self._news.set()

    def _tell_once(self, trouble: str) -> None:
        if trouble != self._said:
            self.say(trouble)
            self._said = trouble


def _failure(reason: str) -> Frame:
    return Frame({"kind": "failed", "reason": reason})


def _trouble(error: grpc.RpcError) -> str:
    """What a failed call tells a person."""
    code, details = error.code(), str(error.details())
    if code is TURNED_AWAY:
        return f"the server does not let this silo in: {details}"
    if "CERTIFICATE_VERIFY_FAILED" in details or "Peer name" in details:
        return "the server's certificate is not one of this federation, or has expired"
    if code in LOST:
        return f"no connection: {details}"
    return f"the connection was lost ({code.name}): {details}"
