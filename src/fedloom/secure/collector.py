"""The server's half of a secure sum: it carries letters, adds up masked numbers and takes the masks from their sum."""

from __future__ import annotations

from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.errors import FedloomError
from fedloom.secure.party import agreed, own_mask
from fedloom.secure.shamir import SHARE, joined
from fedloom.secure.terms import KEY, Genuine, Parts, SecureSumError, Terms, Turn, listed, part_of
from fedloom.secure.words import Integers

MISSING = {
    Turn.KEYS: "sent keys",
    Turn.SHARES: "sent shares",
    Turn.MASKED: "sent numbers",
    Turn.CONSENT: "signed the list",
    Turn.REVEAL: "sent what takes the masks away",
}


class Collector:
    """One sum at the server, turn by turn: ask, take what comes in time, go on with whoever answered.

    It keeps no silo's numbers, not even under masks: what comes is added to the sum at once.
    """

    def __init__(self, terms: Terms, genuine: Genuine) -> None:
        self._terms, self._genuine = terms, genuine
        self._turn = Turn.KEYS
        self._asked = terms.silos
        self._came: dict[str, Parts] = {}  # in this stage
        self._keys: dict[str, bytes] = {}
        self._signed_keys: dict[str, bytes] = {}
        self._letters: dict[str, Parts] = {}  # by who wrote them
        self._present: tuple[str, ...] = ()
        self._signatures: dict[str, bytes] = {}
        self._sum = terms.ring.zeros()
        self._total: Integers | None = None

    @property
    def turn(self) -> Turn:
        """What silos are asked for now."""
        return self._turn

    @property
    def awaited(self) -> tuple[str, ...]:
        """Who has not answered yet."""
        return tuple(silo for silo in self._asked if silo not in self._came)

    @property
    def present(self) -> tuple[str, ...]:
        """Whose numbers are in the sum."""
        return self._present

    def question(self, silo: str) -> Parts:
        """What a silo is asked in this turn."""
        if self._turn is Turn.SHARES:
            return self._signed_keys
        if self._turn is Turn.MASKED:
            return {writer: letters[silo] for writer, letters in self._letters.items() if writer != silo}
        if self._turn is Turn.CONSENT:
            return {"present": listed(self._present)}
        return self._signatures if self._turn is Turn.REVEAL else {}

    def take(self, silo: str, parts: Parts) -> None:
        """A silo's answer; raises where it is none, and goes on without it."""
        if silo not in self.awaited:
            raise SecureSumError(f"silo '{silo}' was not asked for '{self._turn}', or has answered")
        self._came[silo] = {
            Turn.KEYS: self._take_keys,
            Turn.SHARES: self._take_letters,
            Turn.MASKED: self._take_masked,
            Turn.CONSENT: self._take_consent,
            Turn.REVEAL: self._take_reveal,
        }[self._turn](silo, parts)

    def advance(self) -> None:
        """Close the turn: whoever has not answered has dropped out. Below the threshold there is no sum."""
        there = self._terms.require(self._came, MISSING[self._turn])
        came, turn = self._came, self._turn
        self._asked, self._came = there, {}
        if turn is Turn.KEYS:
            self._keys = {silo: came[silo]["keys"] for silo in there}
            self._signed_keys = {silo: came[silo]["keys"] + came[silo]["signature"] for silo in there}
        elif turn is Turn.SHARES:
            self._letters = {silo: came[silo] for silo in there}
        elif turn is Turn.MASKED:
            self._present = there
        elif turn is Turn.CONSENT:
            self._signatures = {silo: came[silo]["signature"] for silo in there}
        else:
            self._total = self._unmasked(came)
            return
        self._turn = list(Turn)[list(Turn).index(turn) + 1]

    @property
    def total(self) -> Integers:
        """The sum, once all turns are closed."""
        if self._total is None:
            raise SecureSumError(f"there is no sum yet: it waits for '{self._turn}'")
        return self._total

    def _take_keys(self, silo: str, parts: Parts) -> Parts:
        keys, signature = part_of(parts, "keys", silo), part_of(parts, "signature", silo)
        if len(keys) != 2 * KEY or not self._genuine(silo, self._terms.keys_words(silo, keys), signature):
            raise SecureSumError(f"silo '{silo}' sent keys that it has not signed")
        return parts

    def _take_letters(self, silo: str, parts: Parts) -> Parts:
        if set(parts) != set(self._asked) - {silo}:
            raise SecureSumError(f"silo '{silo}' sent shares for {sorted(parts)}")
        return parts

    def _take_masked(self, silo: str, parts: Parts) -> Parts:
        self._sum += self._terms.ring.unpacked(part_of(parts, "values", silo))
        return {}

    def _take_consent(self, silo: str, parts: Parts) -> Parts:
        if not self._genuine(silo, self._terms.list_words(self._present), part_of(parts, "signature", silo)):
            raise SecureSumError(f"silo '{silo}' has not signed the list")
        return parts

    def _take_reveal(self, silo: str, parts: Parts) -> Parts:
        if set(parts) != set(self._letters) or any(len(share) != SHARE for share in parts.values()):
            raise SecureSumError(f"silo '{silo}' sent shares of {sorted(parts)}")
        return parts

    def _unmasked(self, came: Mapping[str, Parts]) -> Integers:
        """Take away the own masks of those whose numbers have come, and what they share with those who left since."""
        terms, ring = self._terms, self._terms.ring
        for silo in self._letters:
            shares = {terms.place(helper): parts[silo] for helper, parts in came.items()}
            secret = joined(shares, terms.threshold)
            if silo in self._present:
                ring.mask(self._sum, own_mask(secret, terms), minus=True)
                continue
            key = X25519PrivateKey.from_private_bytes(secret)
            if key.public_key().public_bytes_raw() != self._keys[silo][KEY:]:
                raise FedloomError(f"the shares of silo '{silo}', which left, do not give its key")
            for other in self._present:
                seed = agreed(key, self._keys[other][KEY:], "mask", terms)
                # As ``other`` added it: a plus for those after it in the order of the sum.
                ring.mask(self._sum, seed, minus=terms.place(silo) > terms.place(other))
        return ring.integers(self._sum)
