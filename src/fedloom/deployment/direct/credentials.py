"""A silo's way to its server: its certificate, asked for with a one-time code, and fetched anew before it ends."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from cryptography import x509

from fedloom.deployment.direct.letters import content_of_text, text_of
from fedloom.deployment.direct.transport import CERTIFY, call, open_channel
from fedloom.deployment.directories import SiloDirectory
from fedloom.deployment.keys import client_key, code_key, read_public_key
from fedloom.errors import FedloomError
from fedloom.privacy.signatures import fingerprint
from fedloom.runs.files import write_atomically

SOON = datetime.timedelta(days=30)  # before its end, from which on a newer certificate is asked for
CALL = 20.0  # seconds


@dataclass
class Credentials:
    """What a silo shows."""

    home: SiloDirectory
    say: Callable[[str], None]
    proxy: str = ""
    _warned: str = ""

    def channel(self) -> grpc.Channel:
        """A way to the server in the silo's name; raises while it is not admitted."""
        key = client_key((self.home.path / "node.key").read_bytes())
        left = self._left()
        if left is None:
            self._admit()
        elif left <= datetime.timedelta():
            self._admit_again()
        elif left < SOON:
            self._renew(key, left)
        return self._open(key, self.home.certificate.read_bytes())

    def _left(self) -> datetime.timedelta | None:
        """How long the silo's certificate still holds; None where it has none."""
        if not self.home.certificate.is_file():
            return None
        certificate = x509.load_pem_x509_certificate(self.home.certificate.read_bytes())
        return certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)

    def _admit(self) -> None:
        code = self.home.invitation.code
        if not code:
            raise FedloomError(
                "this silo has no certificate, and its invitation no code: ask the coordinator for another"
            )
        found = self._asked(code.encode(), code.encode())
        if not found:
            key = fingerprint(read_public_key(self.home.public_key)[1])
            raise FedloomError(f"waiting to be admitted: tell the coordinator this key by another way: {key}")
        self._keep(found)

    def _admit_again(self) -> None:
        """A certificate that has run out opens nothing; the code of an invitation that still holds asks for another."""
        try:
            self._admit()
        except (FedloomError, grpc.RpcError):
            self._warn("its certificate has expired: ask the coordinator for another invitation, and join with that")
            raise

    def _renew(self, key: bytes, left: datetime.timedelta) -> None:
        before = self.home.certificate.read_text(encoding="utf-8")
        found = self._asked(key, before.encode())
        if found and found != before:
            self._keep(found)
            return
        self._warn(f"its certificate expires in {left.days} days: the coordinator must run 'fedloom federation renew'")

    def _warn(self, trouble: str) -> None:
        if trouble != self._warned:
            self._warned = trouble
            self.say(trouble)

    def _keep(self, certificate: str) -> None:
        own = read_public_key(self.home.public_key)[1]
        if code_key(certificate) != own:
            raise FedloomError("the server sent a certificate of another key")
        self.home.post.mkdir(mode=0o700, exist_ok=True)
        write_atomically(self.home.certificate, certificate.encode())

    def _asked(self, key: bytes, certificate: bytes) -> str:
        line = read_public_key(self.home.public_key)[1].decode()
        with self._open(key, certificate) as way:
            for said in call(way, CERTIFY, iter([text_of({"key": line})]), CALL):
                return str(content_of_text(said, certificate=str)["certificate"])
        raise FedloomError("the server says nothing")

    def _open(self, key: bytes, certificate: bytes) -> grpc.Channel:
        home = self.home
        authority = (home.path / "ca.crt").read_bytes()
        return open_channel(home.invitation.charter.address, authority, key, certificate, self.proxy)
