"""Who may not call, silos that lie, and servers that lie: what each of them gets."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedloom.deployment.direct import credentials, hub, register
from fedloom.deployment.direct.attendant import Attendant
from fedloom.deployment.direct.letters import TEXT, Letter, Piece, content_of_text, text_of
from fedloom.deployment.direct.transport import (
    ATTEND,
    CERTIFY,
    FETCH,
    OFFER,
    SEND,
    call,
    make_server,
    open_channel,
    server_credentials,
)
from fedloom.deployment.directories import Invitation, SiloDirectory
from fedloom.deployment.keys import client_key, make_authority, make_silo_certificate, read_public_key
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.wire import Question
from fedloom.errors import FedloomError
from rigs import SILOS, DirectRig, standing_rig
from support import names_in, wait_for

SILO, OTHER = SILOS[:2]
CODES = grpc.StatusCode


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DirectRig]:
    with standing_rig("direct", tmp_path_factory.mktemp("rig")) as found:
        assert isinstance(found, DirectRig)
        yield found


def way(rig: DirectRig, silo: str = SILO) -> grpc.Channel:
    """A channel in a silo's name, for whatever its holder makes up."""
    return credentials.Credentials(rig.homes[silo], rig.said.append).channel()


def said(channel: grpc.Channel, name: str, *texts: bytes) -> tuple[grpc.StatusCode, str, list[bytes]]:
    """How a call ends, and what came before."""
    came: list[bytes] = []
    try:
        for message in call(channel, name, iter(texts), 10.0):
            came.append(message)
    except grpc.RpcError as error:
        return error.code(), str(error.details()), came
    return CODES.OK, "", came


def order_for(rig: DirectRig, silo: str, size: int = 5000, limit: int = 10_000) -> Letter:
    frame = Frame({"kind": "task", "round": 1}, {"x": os.urandom(size)})
    wire = rig.wire()
    wire.ask([Question(silo, 0, 1, frame, limit)], 60.0)
    wire._calls.close()
    return Letter.order(silo, frame, limit)


# --- who may not call ---------------------------------------------------------------------------------------------


def certificate_of(rig: DirectRig, keys: Path, name: str, line: bytes, days: int = 10) -> bytes:
    return make_silo_certificate(keys, name, line, days)


def strangers(rig: DirectRig, folder: Path) -> dict[str, tuple[bytes, bytes]]:
    """Keys with certificates that are none of a silo that was admitted."""
    own, server = rig.homes[SILO], rig.server
    key, line = client_key((own.path / "node.key").read_bytes()), read_public_key(own.public_key)[1]
    (folder / "foreign").mkdir()
    make_authority(folder / "foreign", "x")
    other = SiloDirectory.create(folder / "unknown", Invitation.read(server.invitation(SILO)))
    unknown, unknown_line = client_key((other.path / "node.key").read_bytes()), read_public_key(other.public_key)[1]
    return {
        "expired": (key, certificate_of(rig, server.keys, SILO, line, -1)),
        "foreign": (key, certificate_of(rig, folder / "foreign", SILO, line)),
        "unregistered": (unknown, certificate_of(rig, server.keys, SILO, unknown_line)),
        "of no silo": (unknown, certificate_of(rig, server.keys, "nobody", unknown_line)),
        "the server's": ((server.keys / "server.key").read_bytes(), (server.keys / "server.crt").read_bytes()),
    }


AT_THE_DOOR = {"expired", "foreign", "the server's"}


def test_only_admitted_certificates_get_beyond_the_door(rig: DirectRig, tmp_path: Path) -> None:
    address, authority = rig.server.charter.address, rig.server.authority.encode()
    for kind, (key, certificate) in strangers(rig, tmp_path).items():
        with open_channel(address, authority, key, certificate) as channel:
            for name in (ATTEND, FETCH, OFFER, SEND, CERTIFY):
                code, details, came = said(channel, name, text_of({"instance": "x", "version": "0", "device": "cpu"}))
                assert came == []
                if kind in AT_THE_DOOR:
                    assert code is CODES.UNAVAILABLE, (kind, details)
                else:
                    assert code is CODES.PERMISSION_DENIED, (kind, name, details)
                    assert "is not admitted with this key" in details or "has no silo 'nobody'" in details
    assert rig.opened.hub.present() == {}


def test_a_call_of_one_who_may_not_is_not_read(rig: DirectRig, tmp_path: Path) -> None:
    """Who it is is known before the first message: an endless body is never asked for."""
    key, certificate = strangers(rig, tmp_path)["unregistered"]
    asked = []

    def body() -> Iterator[bytes]:
        for _ in range(1000):
            asked.append(1)
            yield bytes(2**19)

    address, authority = rig.server.charter.address, rig.server.authority.encode()
    with open_channel(address, authority, key, certificate) as channel, pytest.raises(grpc.RpcError) as error:
        list(call(channel, SEND, body(), 20.0))
    assert error.value.code() is CODES.PERMISSION_DENIED
    assert len(asked) < 100  # what fits between the two ends


def test_older_tls_is_refused(rig: DirectRig, tmp_path: Path) -> None:
    """A client with every cipher there is and a good certificate, at a server that is a process of its own."""
    home, server = rig.homes[SILO], rig.server
    way(rig).close()  # fetches the certificate
    (tmp_path / "key").write_bytes(client_key((home.path / "node.key").read_bytes()))
    host, _, port = server.charter.address.rpartition(":")

    def agreed(version: ssl.TLSVersion) -> str | None:
        context = ssl.create_default_context(cafile=str(home.path / "ca.crt"))
        context.minimum_version = context.maximum_version = version
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(home.certificate, tmp_path / "key")
        raw = socket.create_connection((host, int(port)), timeout=10)
        with context.wrap_socket(raw, server_hostname=host) as connection:
            return connection.version()

    rig.stop_server()
    command = [sys.executable, "-m", "fedloom.deployment.direct.hub_process", str(server.path), str(rig.socket)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert b"ready" in process.stderr.readline()
        with pytest.raises(ssl.SSLError):
            agreed(ssl.TLSVersion.TLSv1_2)
        assert agreed(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    finally:
        process.terminate()
        process.communicate(timeout=20)
        rig.start_server()


def test_a_connection_of_an_older_tls_may_not_call_even_where_it_came_about(rig: DirectRig) -> None:
    with pytest.raises(FedloomError, match=r"calls come by TLSv1\.3"):
        register.Register(rig.server).peer({"ssl_tls_version": [b"TLSv1.2"]})


def test_an_invitation_lets_its_holder_ask_and_do_nothing_else(rig: DirectRig, tmp_path: Path) -> None:
    server, silo = rig.server, SILOS[2]
    server.revoke(silo)
    code = Invitation.read(server.invite(silo)).code.encode()
    home = SiloDirectory.create(tmp_path / "own", Invitation.read(server.invitation(silo)))
    line = read_public_key(home.public_key)[1].decode()
    address, authority = server.charter.address, server.authority.encode()
    with open_channel(address, authority, code, code) as channel:
        for name in (ATTEND, FETCH, OFFER, SEND):
            status, details, _ = said(channel, name, text_of({"instance": "x", "version": "0", "device": "cpu"}))
            assert (status, "an invitation is for asking" in details) == (CODES.PERMISSION_DENIED, True)
        status, _, (answer,) = said(channel, CERTIFY, text_of({"key": line}))
        assert content_of_text(answer, certificate=str) == {"certificate": ""}
        assert list(server.asking()) == [silo]
        # Who has the same code cannot take the place of the one who asked first.
        other = read_public_key(rig.homes[SILO].public_key)[1].decode()
        status, details, _ = said(channel, CERTIFY, text_of({"key": other}))
        assert (status, "somebody else has used this invitation" in details) == (CODES.PERMISSION_DENIED, True)
        for key in ("x", "ssh x y", "../x y", "a\nb c"):
            status, _, _ = said(channel, CERTIFY, text_of({"key": key}))
            assert status in (CODES.INVALID_ARGUMENT, CODES.PERMISSION_DENIED)
        server.admit(server.pending / f"{silo}.pub")
        status, _, (answer,) = said(channel, CERTIFY, text_of({"key": line}))
        assert "BEGIN CERTIFICATE" in content_of_text(answer, certificate=str)["certificate"]
        server.invite(silo)  # a new one makes this one worthless
        status, details, _ = said(channel, CERTIFY, text_of({"key": line}))
        assert (status, "holds no more" in details) == (CODES.PERMISSION_DENIED, True)
    assert server.asking() == {}


def test_a_revoked_silo_is_sent_away_while_it_attends(rig: DirectRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BEAT", 0.1)
    rig.join(OTHER, lambda frame: frame)
    rig.server.revoke(OTHER)
    wait_for(lambda: OTHER not in rig.opened.hub.present(), "it is sent away", 10)
    wait_for(lambda: any(f"silo '{OTHER}' is not admitted with this key" in line for line in rig.said), "it is told")
    rig.server.admit(rig.homes[OTHER].public_key)
    wait_for(lambda: OTHER in rig.opened.hub.present(), "it is back", 15)
    rig.leave(OTHER)


def test_a_certificate_that_ends_while_its_silo_attends_ends_that(
    rig: DirectRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = register._peer((rig.homes[SILO].certificate).read_bytes())
    register.Register(rig.server).check(peer)
    later = peer.certificate.not_valid_after_utc

    class Clock(register.datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return later.replace(year=later.year + 1)

    monkeypatch.setattr(register.datetime, "datetime", Clock)
    with pytest.raises(FedloomError, match="has expired: the coordinator must renew it"):
        register.Register(rig.server).check(peer)


# --- silos that lie -----------------------------------------------------------------------------------------------


def pieces_of(*parts: bytes) -> tuple[Piece, ...]:
    return tuple(Piece(f"p{n}", sha256(part).hexdigest(), len(part)) for n, part in enumerate(parts))


def test_a_silo_reaches_its_own_orders_alone(rig: DirectRig) -> None:
    theirs = order_for(rig, OTHER)
    digest = theirs.parts[0].sha256
    with way(rig) as channel:
        asked = text_of({"number": theirs.number, "sha256": digest, "offset": 0})
        assert said(channel, FETCH, asked)[:2] == (CODES.INVALID_ARGUMENT, "this part is of no order of this silo")
        answer = Letter(theirs.number, 1, {"kind": "update"}, ()).to_bytes()
        assert said(channel, OFFER, answer)[:2] == (CODES.INVALID_ARGUMENT, "this order is not this silo's")
    state = rig.opened.hub._mailbox.state(theirs.number)
    assert state is not None
    assert state[2] is None


def test_a_silo_sends_no_more_than_was_asked_for_and_nothing_else(rig: DirectRig) -> None:
    own = order_for(rig, SILO, limit=100)
    before = names_in(rig.server.post / "parts")
    small, large = b"a" * 100, b"a" * 101
    with way(rig) as channel:
        offer = Letter(own.number, 1, {"kind": "update"}, pieces_of(large)).to_bytes()
        code, details, _ = said(channel, OFFER, offer)
        assert (code, details) == (CODES.INVALID_ARGUMENT, "an answer has 101 bytes; 100 are allowed")
        (piece,) = pieces_of(small)
        begin = text_of({"sha256": piece.sha256, "offset": 0})
        assert said(channel, SEND, begin, small)[1] == "this part was not offered"
        said(channel, OFFER, Letter(own.number, 1, {"kind": "update"}, (piece,)).to_bytes())
        assert said(channel, SEND, begin, small + b"x")[1] == "a part is longer than it was said to be"
        assert said(channel, SEND, begin, b"b" * 100)[1] == "a part is not what its digest says"
        assert said(channel, SEND, text_of({"sha256": piece.sha256, "offset": 7}), small)[0] is CODES.INVALID_ARGUMENT
        assert said(channel, SEND, text_of({"sha256": "../../x", "offset": 0}), small)[0] is CODES.INVALID_ARGUMENT
        assert said(channel, SEND, begin, small)[0] is CODES.OK
        old = Letter(own.number, 2, {"kind": "update"}, (piece,)).to_bytes()
        assert content_of_text(said(channel, OFFER, old)[2][0], settled=bool, wanted=dict)["settled"]  # it is dropped
        state = rig.opened.hub._mailbox.state(own.number)
        assert state is not None
        assert state[2] is None
    assert set(names_in(rig.server.post / "parts")) - set(before) == {piece.sha256}


def test_a_silo_fills_no_disk_with_what_it_offers_and_drops(rig: DirectRig) -> None:
    """Whole parts and begun ones: what the next offer does not name is gone."""
    own, before = order_for(rig, SILO, limit=1000), set(names_in(rig.server.post / "parts"))
    with way(rig) as channel:
        for number in range(5):
            whole, half = os.urandom(100), os.urandom(100)
            said(channel, OFFER, Letter(own.number, 1, {"n": number}, pieces_of(whole, half)).to_bytes())
            for part, sent in ((whole, whole), (half, half[:50])):
                begin = text_of({"sha256": sha256(part).hexdigest(), "offset": 0})
                assert said(channel, SEND, begin, sent)[0] is CODES.OK
        kept = set(names_in(rig.server.post / "parts")) - before - {own.parts[0].sha256}
    assert kept == {sha256(whole).hexdigest(), f"{sha256(half).hexdigest()}.{SILO}"}


def test_a_silo_takes_no_more_calls_than_its_own(rig: DirectRig) -> None:
    """Others are served while it holds as many as it may."""
    over = threading.Event()

    def waiting() -> Iterator[bytes]:
        over.wait(20)
        yield b"{}"

    channels = [way(rig) for _ in range(hub.CALLS)]
    held = [call(channel, FETCH, waiting()) for channel in channels]
    wait_for(lambda: rig.opened.hub._calling[SILO] == hub.CALLS, "all of them wait")
    with way(rig, OTHER) as other:
        assert said(other, FETCH, b"{}")[0] is CODES.INVALID_ARGUMENT
    assert "calls under way already" in said(channels[0], FETCH, b"{}")[1]
    over.set()
    for each, channel in zip(held, channels, strict=True):
        with pytest.raises(grpc.RpcError):
            list(each)
        channel.close()
    wait_for(lambda: rig.opened.hub._calling[SILO] == 0, "none is left")


@pytest.mark.parametrize("name", [ATTEND, FETCH, OFFER, SEND, CERTIFY])
def test_nonsense_is_a_sentence(rig: DirectRig, name: str) -> None:
    huge = b"{" + b" " * TEXT
    with way(rig) as channel:
        for texts in ((), (b"",), (b"\0" * 100,), (b"[]",), (b'{"number": 1}',), (b"[" * 10_000,), (huge,)):
            code, details, came = said(channel, name, *texts)
            assert code is CODES.INVALID_ARGUMENT, (texts, details)
            assert came == []
        assert said(channel, name, bytes(TEXT + 2**17))[0] is CODES.RESOURCE_EXHAUSTED
        assert said(channel, "StartRun", b"{}")[0] is CODES.UNIMPLEMENTED
    assert rig.opened.hub.present() == {}


# --- servers that lie ---------------------------------------------------------------------------------------------


class Liar:
    """A server with the federation's own key, whose calls do as a test says."""

    def __init__(self, rig: DirectRig, calls: dict[str, Callable[..., Iterator[bytes]]]) -> None:
        rig.stop_server()
        self._rig, home = rig, rig.server
        self._server = make_server(calls, 16)
        key, certificate = (home.keys / "server.key").read_bytes(), (home.keys / "server.crt").read_bytes()
        self._server.add_secure_port(
            home.charter.address, server_credentials(key, certificate, home.authority.encode())
        )
        self._server.start()

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0.2).wait()
        self._rig.start_server()


def notice(letter: Letter) -> bytes:
    return text_of({"notice": "order", "letter": letter.to_bytes().decode()})


GOOD = Letter.order(SILO, Frame({"kind": "task", "round": 1}, {"x": b"12345"}), 1000)
ORDERS: dict[str, tuple[bytes, str]] = {
    "a path for a digest": (
        text_of({"notice": "order", "letter": GOOD.to_bytes().decode().replace(GOOD.parts[0].sha256, "../../x")}),
        "a digest must be 64 small hexadecimal digits",
    ),
    "too large": (
        notice(Letter(GOOD.number, 1, {}, (Piece("x", GOOD.parts[0].sha256, 2**39),))),
        "the server sends an order of 549755813888 bytes",
    ),
    "an unknown notice": (
        text_of({"notice": "install", "letter": "x.whl"}),
        "a notice that this version does not know",
    ),
    "nonsense": (b"\0\1\2", "this is no text of the wire"),
    "a withdrawal of a path": (text_of({"notice": "withdrawn", "letter": "/etc/passwd"}), "a digest must be"),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_a_server_that_lies_in_an_order_is_told_nothing_and_changes_nothing(rig: DirectRig, kind: str) -> None:
    text, sentence = ORDERS[kind]
    over = threading.Event()

    def attend(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield text
        over.wait(20)

    worked: list[Frame] = []
    attendant = rig.attendant(SILO)
    with Liar(rig, {ATTEND: attend}):
        rig.said.clear()
        rig.start(attendant, lambda frame: (worked.append(frame), frame)[1])
        wait_for(lambda: any(sentence in line for line in rig.said), "the silo says so", 15)
        over.set()
    assert worked == []
    assert attendant.mailbox.open(SILO) == []
    rig.leave(SILO)


def test_a_server_that_sends_other_bytes_than_it_named_gets_an_error(rig: DirectRig) -> None:
    """Too many of them, or others: neither reaches the worker, and nothing of them stays."""
    over, offers, worked = threading.Event(), list[Letter](), list[Frame]()

    def attend(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield notice(GOOD)
        over.wait(20)

    def fetch(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield b"54321"

    def endless(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        while context.is_active():
            yield bytes(2**20)

    def offer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        offers.append(Letter.of_bytes(next(requests)))
        yield text_of({"settled": True, "wanted": {}})

    for fetching, sentence in ((fetch, "is not what its digest says"), (endless, "longer than it was said to be")):
        over.clear()
        offers.clear()
        attendant = rig.attendant(SILO)
        with Liar(rig, {ATTEND: attend, FETCH: fetching, OFFER: offer}):
            rig.start(attendant, lambda frame: (worked.append(frame), frame)[1])
            wait_for(lambda: offers, "an error is sent", 15)
            over.set()
        assert (offers[0].kind, sentence in offers[0].header["reason"]) == ("failed", True)
        assert (worked, offers[0].parts) == ([], ())
        rig.leave(SILO)


def test_a_silo_has_nothing_that_a_server_could_call(rig: DirectRig) -> None:
    """An attendant opens connections and listens to none."""
    attendant: Attendant = rig.attendant(SILO)
    before = listening_ports()
    rig.start(attendant, lambda frame: frame)
    assert attendant.connected.wait(15)
    assert listening_ports() == before
    rig.leave(SILO)


def listening_ports() -> set[str]:
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    own = {str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}
