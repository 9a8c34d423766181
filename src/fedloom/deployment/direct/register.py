"""Who may call: a silo's certificate, and the key that its coordinator admitted, looked up with every call."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cryptography import x509
from cryptography.x509.oid import NameOID

from fedloom.deployment.directories import Invitation, ServerDirectory
from fedloom.deployment.keys import INVITED, key_line
from fedloom.errors import FedloomError
from fedloom.runs.files import write_atomically

TLS = "TLSv1.3"


class NotAdmittedError(FedloomError):
    """Whoever calls may not."""


@dataclass(frozen=True)
class Peer:
    """Who calls, as the certificate says: a silo, or somebody who was invited to become it."""

    silo: str
    key: bytes
    certificate: x509.Certificate
    invited: bool


@dataclass(frozen=True)
class Register:
    """The silos of a federation, as its server's folder knows them now."""

    home: ServerDirectory

    def peer(self, shown: Mapping[str, Sequence[bytes]]) -> Peer:
        """Who stands behind a connection; raises for one who may not call."""
        if [value.decode() for value in shown.get("ssl_tls_version", ())] != [TLS]:
            raise NotAdmittedError(f"calls come by {TLS}")
        (pem,) = shown["x509_pem_cert"]
        found = _peer(pem)
        self.check(found)
        return found

    def check(self, peer: Peer) -> None:
        """Raise unless the peer may call now: admissions are taken back, and certificates end, while it is there."""
        silo, now = peer.silo, datetime.datetime.now(datetime.UTC)
        if not peer.certificate.not_valid_before_utc <= now <= peer.certificate.not_valid_after_utc:
            raise NotAdmittedError(f"the certificate of silo '{silo}' has expired: the coordinator must renew it")
        if silo not in self.home.charter.silos:
            raise NotAdmittedError(f"this federation has no silo '{silo}'")
        if peer.invited:
            path = self.home.invitation(silo)
            if not path.is_file() or Invitation.read(path).code_key != peer.key:
                raise NotAdmittedError(
                    f"this invitation of silo '{silo}' holds no more: ask the coordinator for another"
                )
        elif self.home.key_admitted(silo) != peer.key:
            raise NotAdmittedError(f"silo '{silo}' is not admitted with this key")

    def certificate(self, peer: Peer, line: bytes) -> str:
        """The newest certificate of a silo's key; empty while it is not admitted, which is then asked for."""
        silo = peer.silo
        admitted = self.home.key_admitted(silo)
        if admitted == line:
            path = self.home.certificate(silo)
            return path.read_text(encoding="utf-8") if path.is_file() else ""
        if admitted or not peer.invited:
            raise NotAdmittedError(f"silo '{silo}' has another key: its coordinator must invite it anew")
        pending = self.home.pending / f"{silo}.pub"
        if not pending.is_file():
            write_atomically(pending, line + f" fedloom:{silo}\n".encode())
        elif not pending.read_bytes().startswith(line + b" "):
            raise NotAdmittedError(f"somebody else has used this invitation of silo '{silo}': tell the coordinator")
        return ""


@lru_cache(256)
def _peer(pem: bytes) -> Peer:
    certificate = x509.load_pem_x509_certificate(pem)
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    silo = str(name.value)
    return Peer(silo.removeprefix(INVITED), key_line(certificate), certificate, silo.startswith(INVITED))
