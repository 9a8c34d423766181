"""Who may ask the studio, and for what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from fedloom.errors import ConfigError
from fedloom.studio import pages
from fedloom.studio.gate import HEADERS, LONGEST_ADDRESS, Admission
from fedloom.studio.server import Listener
from studio.conftest import Ask

TOKEN = "a-token-that-is-long-enough"
OPEN = Admission(frozenset({"localhost", "box"}), any_address=True, token=TOKEN, cookie="studio")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_it_only_reads(client: TestClient, method: str) -> None:
    answer = client.request(method, "/")
    assert (answer.status_code, answer.text) == (405, f"The studio only reads: {method} is not allowed.")


def chunks() -> Iterator[bytes]:
    yield b"x"


@pytest.mark.parametrize("body", [b"x", b"x" * 10_000_000, chunks()], ids=["small", "large", "of unknown size"])
def test_a_body_is_refused_unread(client: TestClient, body: bytes | Iterator[bytes]) -> None:
    answer = client.request("GET", "/", content=body)
    assert (answer.status_code, answer.text) == (413, "A request to the studio has no body.")


@pytest.mark.parametrize(("length", "status"), [(LONGEST_ADDRESS, 400), (LONGEST_ADDRESS + 1, 414)])
def test_a_long_address_is_refused(client: TestClient, length: int, status: int) -> None:
    path = "/compare?run="
    assert client.get(path + "x" * (length - len(path) + 1)).status_code == status  # "?" is not counted


@pytest.mark.parametrize(("length", "status"), [(16_000, 200), (16_384, 431)])
def test_large_headers_are_refused(client: TestClient, length: int, status: int) -> None:
    assert client.get("/", headers={"X-Long": "x" * length}).status_code == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1", 200),  # a port that is forwarded
        ("127.0.0.1:8260", 200),
        ("127.1.2.3", 200),
        ("[::1]:8260", 200),
        ("LOCALHOST", 200),
        ("evil.example", 421),  # a name that somebody turned to this machine
        ("localhost.evil.example", 421),
        ("evil.example@localhost", 200),  # the part before @ names nobody
        ("192.168.0.1", 421),
        ("2130706433", 421),
        ("0.0.0.0", 421),
        ("", 421),
        ("[::1", 421),
    ],
)
def test_the_host_must_be_this_machine(client: TestClient, host: str, status: int) -> None:
    assert client.get("/", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("hosts", [("localhost", "evil.example"), ("evil.example", "localhost"), ("localhost",) * 2])
def test_two_hosts_are_none(client: TestClient, hosts: tuple[str, str]) -> None:
    assert client.get("/", headers=[("Host", host) for host in hosts]).status_code == 421


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://localhost:8260"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:9999"}, 403),  # another program of this machine
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
    ],
)
def test_another_site_gets_nothing_but_a_link(client: TestClient, headers: dict[str, str], status: int) -> None:
    assert client.get("/", headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/", "/nowhere", "/static/runs.js"])
def test_every_answer_is_locked_down(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert {name: headers[name] for name in HEADERS} == HEADERS
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    assert headers["Cache-Control"] == "no-store"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("accept", ["text/html", "*/*"])
def test_an_answer_to_a_fault_is_locked_down_too(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, accept: str
) -> None:
    monkeypatch.setattr(pages, "papers_page", lambda: 1 / 0)
    quiet = TestClient(client.app, base_url="http://localhost:8260", raise_server_exceptions=False)
    answer = quiet.get("/papers", headers={"Accept": accept})
    assert answer.status_code == 500
    assert "the studio failed at this; its terminal says how" in answer.text
    assert "ZeroDivisionError" not in answer.text
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert answer.headers["Cache-Control"] == "no-store"


def test_nothing_is_shown_without_the_token(ask: Ask, trained: Path) -> None:
    client = ask(trained, OPEN)
    for path in ("/", "/events", "/static/runs.js", "/?token=wrong", "/?token="):
        answer = client.get(path)
        assert answer.status_code == 401
        assert answer.text.startswith("This studio asks for its token")
    assert client.get("/", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/", headers={"Cookie": "studio=wrong"}).status_code == 401
    assert client.get("/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_a_token_leaves_the_address_and_stays_as_a_cookie(ask: Ask, trained: Path) -> None:
    client = ask(trained, OPEN)
    answer = client.get(f"/compare?run=a&token={TOKEN}&run=b")
    assert (answer.status_code, answer.headers["location"]) == (303, "/compare?run=a&run=b")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"studio={TOKEN};")
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert client.get("/").status_code == 200


def test_a_token_is_no_way_to_another_site(ask: Ask, trained: Path) -> None:
    answer = ask(trained, OPEN).get(f"http://localhost//evil.example/?token={TOKEN}")
    assert answer.headers["location"] == "/evil.example/"


@pytest.mark.parametrize(("host", "status"), [("192.168.0.1", 401), ("box", 401), ("evil.example", 421)])
def test_elsewhere_any_address_may_be_called_and_names_of_this_machine(
    ask: Ask, trained: Path, host: str, status: int
) -> None:
    assert ask(trained, OPEN).get("/", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(("host", "asks"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_only_loopback_does_without_a_token(host: str, asks: bool) -> None:
    place = Listener.of(host, 0, "")
    try:
        assert bool(place.door.token) == asks
        assert len(place.door.token) in (0, 43)  # 32 random bytes
        assert place.address.endswith(f"?token={place.door.token}") == asks
        assert place.door.any_address == asks
    finally:
        place.listener.close()


def test_each_token_is_a_new_one() -> None:
    places = [Listener.of("0.0.0.0", 0, "") for _ in range(2)]
    assert len({place.door.token for place in places}) == 2
    for place in places:
        place.listener.close()


def test_a_given_token_holds_on_loopback_too_and_is_not_short() -> None:
    place = Listener.of("127.0.0.1", 0, TOKEN)
    place.listener.close()
    assert place.door.token == TOKEN
    with pytest.raises(ConfigError, match="--token has 5 characters; it must have at least 16"):
        Listener.of("127.0.0.1", 0, "short")


def test_an_address_that_is_taken_is_said_so() -> None:
    place = Listener.of("127.0.0.1", 0, "")
    port = place.listener.getsockname()[1]
    with pytest.raises(ConfigError, match=f"cannot listen at --host 127.0.0.1 --port {port}: Address already in use"):
        Listener.of("127.0.0.1", port, "")
    place.listener.close()
    with pytest.raises(ConfigError, match=r"cannot listen at --host 192.*: Cannot assign requested address"):
        Listener.of("192.0.2.1", 0, "")  # an address of documents alone
