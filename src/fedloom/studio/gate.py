"""The one door: who may ask, what may be asked, and what a browser may do with the answer.

The studio only reads, so nothing but GET without a body is let in, but for deeds of a workbench: a small form that one
of its own pages sends, with the token. A page of another site can make a browser
send requests here, by address or by a name that it turns to this machine (DNS rebinding): the Host must be an address
or a name of this machine, and a browser that says that another site asked is refused. Elsewhere than on loopback a
token is asked for as well.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LONGEST_ADDRESS = 4096
LARGEST_HEADERS = 16_384  # bytes
DEED, LARGEST_DEED = "/work", 8_192  # where a deed goes, and its bytes
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def lock(headers: MutableHeaders) -> None:
    """What every answer says to a browser."""
    headers.update(HEADERS)
    headers.setdefault("Cache-Control", "no-store")


@dataclass(frozen=True)
class Admission:
    """For whom the door opens: names and addresses of this machine, and the token, if one is asked for."""

    names: frozenset[str]  # host names that are this machine
    any_address: bool = False  # whether any IP address may be called, or those of loopback alone
    token: str = ""
    cookie: str = "fedloom-studio"
    works: bool = False  # whether deeds are let in

    def knows(self, host: str) -> bool:
        """Whether a Host header names this machine; a port makes no difference, because ports are forwarded."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.any_address or address.is_loopback

    def fits(self, given: str) -> bool:
        """Whether a token is the one asked for, compared in constant time."""
        return secrets.compare_digest(given.encode(), self.token.encode())


@dataclass(frozen=True)
class Refusal:
    """An answer to a request that is not let in."""

    status: int
    sentence: str


def _is_deed(scope: Scope, door: Admission) -> bool:
    return door.works and scope["method"] == "POST" and scope["path"] == DEED


def _method(scope: Scope, _: Headers, door: Admission) -> Refusal | None:
    if scope["method"] == "GET" or _is_deed(scope, door):
        return None
    return Refusal(405, f"The studio only reads: {scope['method']} is not allowed.")


def _size(scope: Scope, headers: Headers, door: Admission) -> Refusal | None:
    length = headers.get("content-length", "0")
    small = _is_deed(scope, door) and length.isdecimal() and int(length) <= LARGEST_DEED
    if (length != "0" and not small) or "transfer-encoding" in headers:
        return Refusal(413, "A request to the studio has no body.")
    if len(scope["raw_path"]) + len(scope["query_string"]) > LONGEST_ADDRESS:
        return Refusal(414, f"An address of the studio has at most {LONGEST_ADDRESS:,} characters.")
    if sum(len(name) + len(value) for name, value in headers.raw) > LARGEST_HEADERS:
        return Refusal(431, f"The headers of a request have at most {LARGEST_HEADERS:,} bytes.")
    return None


def _host(_: Scope, headers: Headers, door: Admission) -> Refusal | None:
    hosts = headers.getlist("host")
    if len(hosts) == 1 and door.knows(hosts[0]):
        return None
    return Refusal(421, "This studio does not go by the name that was asked for; open the address that it printed.")


def _site(scope: Scope, headers: Headers, door: Admission) -> Refusal | None:
    """Another site may lead a person here by a link; it may not fetch, embed or frame anything, nor do a deed."""
    refusal = Refusal(403, "Another site may not ask the studio for anything.")
    if _is_deed(scope, door) and "origin" not in headers:
        return refusal
    if (origin := headers.get("origin")) and origin != f"{scope['scheme']}://{headers['host']}":
        return refusal
    asked = {name: headers.get(f"sec-fetch-{name}", "") for name in ("site", "mode", "dest")}
    link = (asked["mode"], asked["dest"]) == ("navigate", "document")
    return refusal if asked["site"] in ("cross-site", "same-site") and not link else None


def _token(_: Scope, headers: Headers, door: Admission) -> Refusal | None:
    kind, *bearer = headers.get("authorization", "").split(" ", maxsplit=1)
    given = "".join(bearer) if kind.lower() == "bearer" else _cookies(headers).get(door.cookie, "")
    if not door.token or door.fits(given):
        return None
    return Refusal(401, "This studio asks for its token: open the address that 'fedloom studio' printed.")


CHECKS: tuple[Callable[[Scope, Headers, Admission], Refusal | None], ...] = (_method, _size, _host, _site, _token)


def _cookies(headers: Headers) -> Mapping[str, str]:
    try:
        found = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return {}
    return {name: morsel.value for name, morsel in found.items()}


@dataclass(frozen=True)
class StudioGate:
    """Stands before the whole application."""

    app: ASGIApp
    door: Admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                lock(MutableHeaders(scope=message))
            await send(message)

        await self._answer(scope)(scope, receive, guarded)

    def _answer(self, scope: Scope) -> ASGIApp:
        headers = Headers(scope=scope)
        for check in CHECKS:
            refusal = check(scope, headers, self.door)
            if refusal is not None:
                presented = self._presented(scope) if refusal.status == 401 else None
                return presented or PlainTextResponse(refusal.sentence, refusal.status)
        return self.app

    def _presented(self, scope: Scope) -> Response | None:
        """A token in the address becomes a cookie, and leaves the address."""
        asked = parse_qsl(scope["query_string"].decode("latin-1"))
        if not any(name == "token" and self.door.fits(value) for name, value in asked):
            return None
        rest = urlencode([(name, value) for name, value in asked if name != "token"])
        path = "/" + scope["path"].lstrip("/")  # "//name" would lead to another site
        answer = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
        # Lax: whoever follows a link to the studio keeps the cookie; other requests of other sites are refused above.
        answer.set_cookie(self.door.cookie, self.door.token, httponly=True, samesite="lax")
        return answer
