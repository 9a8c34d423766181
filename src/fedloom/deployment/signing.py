"""A silo's signature: what its worker states is signed by its node, which has the key and sees no record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cryptography import x509

from fedloom.deployment.directories import SiloDirectory
from fedloom.engines.remote.frames import STATEMENT, Frame
from fedloom.engines.remote.secure_frames import signed, words_to_sign
from fedloom.engines.remote.statement_frames import bundle_in, statement_frame, words_in
from fedloom.errors import FedloomError
from fedloom.privacy.signatures import PrivateKey, read_private_key, sign
from fedloom.privacy.statement_body import written_time
from fedloom.privacy.statements import TERMS, Bundle, Statement, signed_statement


@dataclass(frozen=True)
class Signatory:
    """Signs in a silo's name, statements about its own federation alone."""

    home: SiloDirectory
    key: PrivateKey

    @classmethod
    def of(cls, home: SiloDirectory) -> Signatory:
        """With the key by which the silo joins."""
        path = home.path / "node.key"
        if not path.is_file():
            raise FedloomError(f"silo '{home.name}' has no key to sign with: there is no {path}")
        return cls(home, read_private_key(path.read_bytes()))

    def passed(self, asked: Frame, answer: Frame) -> Frame:
        """The worker's answer as it leaves: a statement signed, words of a secure sum too, anything else as it is."""
        if words := words_to_sign(answer):
            return signed(answer, sign(words, self.key))
        if answer.kind != STATEMENT:
            return answer
        return statement_frame(self.signed(bundle_in(asked), words_in(answer)))

    def signed(self, bundle: Bundle, words: Mapping[str, Any], now: datetime | None = None) -> Statement:
        """What was asked, of this silo, in this federation; nothing else gets a signature."""
        charter, name, now = self.home.invitation.charter, self.home.name, now or datetime.now(UTC)
        if bundle.charter != charter.to_mapping():
            raise FedloomError(f"silo '{name}' was invited to another charter than the one that it is asked about")
        if words.get("silo") != name:
            raise FedloomError(f"silo '{name}' signs no statement of '{words.get('silo')}'")
        for term, value in bundle.terms.items():
            if words.get(term) != value:
                raise FedloomError(f"silo '{name}' was asked about another {TERMS[term]} than its worker states")
        founded = x509.load_pem_x509_certificate(self.home.invitation.authority.encode()).not_valid_before_utc
        if now < founded:
            raise FedloomError(f"the clock of silo '{name}' is wrong: the federation was founded later than it says")
        return signed_statement({**words, "founded": written_time(founded), "date": written_time(now)}, self.key)
