"""A silo's half of a secure sum, with the check that all silos are told the same list.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, figure 4.

Fresh keys for every sum; nothing is written to a disk, and nothing is answered twice: a silo that is started again in
the midst of a sum has dropped out of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from fedloom.errors import MissingExtraError
from fedloom.secure.shamir import SHARE, divided
from fedloom.secure.terms import (
    KEY,
    Genuine,
    Parts,
    SecureSumError,
    Sign,
    Terms,
    Turn,
    names_in,
    part_of,
)
from fedloom.secure.words import Integers

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ModuleNotFoundError as error:
    raise MissingExtraError(f"secure sums need the package '{error.name}'; pip install 'fedloom[privacy]'") from error

NONCE = bytes(12)  # a key seals one letter in each direction, and the direction is part of what the key is made of


def agreed(own: X25519PrivateKey, other: bytes, purpose: str, terms: Terms) -> bytes:
    """32 bytes that two silos alone can make, for one purpose in one sum."""
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise SecureSumError("a public key is none") from error
    return HKDF(SHA256(), 32, salt=terms.digest, info=purpose.encode()).derive(shared)


def own_mask(secret: bytes, terms: Terms) -> bytes:
    """The seed of a silo's own mask, from the secret that it shares out."""
    return HKDF(SHA256(), 32, salt=terms.digest, info=b"own mask").derive(secret)


class Party:
    """One silo in one sum."""

    def __init__(self, terms: Terms, silo: str, sign: Sign, genuine: Genuine) -> None:
        terms.place(silo)
        self._terms, self._silo, self._sign, self._genuine = terms, silo, sign, genuine
        self._letter_key, self._mask_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._own_secret = os.urandom(32)
        self._roster: dict[str, bytes] = {}  # letter key and mask key of each silo that is there
        self._shares: dict[str, bytes] = {}  # of its mask key, and of its own mask, from each silo that sent them
        self._present: tuple[str, ...] = ()  # whose numbers have come, as this silo has signed it
        self._done: list[Turn] = []

    def keys(self) -> Parts:
        """Turn 1: two fresh public keys, with this silo's signature."""
        self._enter(Turn.KEYS)
        keys = b"".join(key.public_key().public_bytes_raw() for key in (self._letter_key, self._mask_key))
        return {"keys": keys, "signature": self._sign(self._terms.keys_words(self._silo, keys))}

    def shares(self, roster: Mapping[str, bytes]) -> Parts:
        """Turn 2: from everybody's signed keys to a sealed letter for each of the others."""
        self._enter(Turn.SHARES)
        there = self._terms.require(roster, "sent keys")
        for silo in there:
            keys, signature = roster[silo][: 2 * KEY], roster[silo][2 * KEY :]
            if silo != self._silo and not self._genuine(silo, self._terms.keys_words(silo, keys), signature):
                raise SecureSumError(f"the keys of silo '{silo}' are not signed with the key that it is known by")
            self._roster[silo] = keys
        own = b"".join(key.public_key().public_bytes_raw() for key in (self._letter_key, self._mask_key))
        if self._roster.get(self._silo) != own:
            raise SecureSumError(f"silo '{self._silo}' finds other keys under its own name")
        places, threshold = [self._terms.place(silo) for silo in there], self._terms.threshold
        of_key = divided(self._mask_key.private_bytes_raw(), places, threshold)
        of_mask = divided(self._own_secret, places, threshold)
        letters = {}
        for silo, place in zip(there, places, strict=True):
            if silo == self._silo:
                self._shares[silo] = of_key[place] + of_mask[place]
            else:
                letters[silo] = self._seal(self._silo, silo).encrypt(NONCE, of_key[place] + of_mask[place], None)
        return letters

    def masked(self, letters: Mapping[str, bytes], values: Integers) -> Parts:
        """Turn 3: the silo's numbers under its own mask and one with each silo that has sent shares."""
        self._enter(Turn.MASKED)
        there = self._terms.require([*letters, self._silo], "sent shares")
        for silo in there:
            if silo == self._silo:
                continue
            if silo not in self._roster:
                raise SecureSumError(f"silo '{silo}' sends shares, but sent no keys")
            try:
                shares = self._seal(silo, self._silo).decrypt(NONCE, letters[silo], None)
            except InvalidTag as error:
                raise SecureSumError(f"the letter of silo '{silo}' was not written for this sum") from error
            if len(shares) != 2 * SHARE:
                raise SecureSumError(f"the letter of silo '{silo}' holds no two shares")
            self._shares[silo] = shares
        ring, place = self._terms.ring, self._terms.place(self._silo)
        words = ring.words(values)
        ring.mask(words, own_mask(self._own_secret, self._terms))
        for silo in there:
            if silo != self._silo:
                seed = agreed(self._mask_key, self._roster[silo][KEY:], "mask", self._terms)
                ring.mask(words, seed, minus=self._terms.place(silo) < place)
        return {"values": ring.packed(words)}

    def consent(self, parts: Mapping[str, bytes]) -> Parts:
        """Turn 4: this silo's signature under the list of those whose numbers have come."""
        self._enter(Turn.CONSENT)
        present = self._terms.require(names_in(part_of(parts, "present", self._silo)), "sent numbers")
        if missing := [silo for silo in present if silo not in self._shares]:
            raise SecureSumError(f"silo '{missing[0]}' is listed, but sent no shares")
        if self._silo not in present:
            raise SecureSumError(f"silo '{self._silo}' sent its numbers, and is not listed")
        self._present = present
        return {"signature": self._sign(self._terms.list_words(present))}

    def reveal(self, signatures: Mapping[str, bytes]) -> Parts:
        """Turn 5: of each silo one share: of its own mask if its numbers have come, else of its key; never of both."""
        self._enter(Turn.REVEAL)
        signed = self._terms.require(signatures, "signed the list")
        words = self._terms.list_words(self._present)
        for silo in signed:
            known = silo == self._silo or self._genuine(silo, words, signatures[silo])
            if silo not in self._present or not known:
                raise SecureSumError(f"silo '{silo}' has not signed the list that silo '{self._silo}' was shown")
        return {
            silo: shares[SHARE:] if silo in self._present else shares[:SHARE] for silo, shares in self._shares.items()
        }

    def _seal(self, sender: str, receiver: str) -> ChaCha20Poly1305:
        other = receiver if sender == self._silo else sender
        purpose = f"letter from {self._terms.place(sender)} to {self._terms.place(receiver)}"
        return ChaCha20Poly1305(agreed(self._letter_key, self._roster[other][:KEY], purpose, self._terms))

    def check_due(self, turn: Turn) -> None:
        """Each turn once, in order: a mask that covers two vectors covers neither."""
        if [*self._done, turn] != list(Turn)[: len(self._done) + 1]:
            raise SecureSumError(f"silo '{self._silo}' is asked for '{turn}' after {list(map(str, self._done))}")

    def _enter(self, turn: Turn) -> None:
        self.check_due(turn)
        self._done.append(turn)
