"""What all who take part in one secure sum have agreed on, and the words that they say to each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from hashlib import sha256

from fedloom.errors import ConfigError, FedloomError
from fedloom.secure.words import Ring

Parts = dict[str, bytes]  # a message: named bytes, which any wire can carry
Sign = Callable[[bytes], bytes]  # with a silo's registered key
Genuine = Callable[[str, bytes, bytes], bool]  # whether a silo's registered key has signed these bytes
KEY = 32  # bytes of a public key
PREFIX = b"fedloom secure sum "  # begins all that is signed here, and nothing else that a registered key signs


class Turn(StrEnum):
    """What is asked of a silo, one after the other."""

    KEYS = "keys"  # fresh public keys, signed
    SHARES = "shares"  # of its secrets, sealed for each other silo
    MASKED = "masked"  # its numbers under masks
    CONSENT = "consent"  # its signature under the list of those whose numbers have come
    REVEAL = "reveal"  # the shares that take the masks from the sum


class SecureSumError(FedloomError):
    """A secure sum that does not come about, or in which somebody does not keep to the protocol."""


@dataclass(frozen=True)
class Terms:
    """One sum: whose, of what, and how many must stay to the end."""

    session: str  # no other sum has it: masks, letters and signatures belong to this one
    silos: tuple[str, ...]
    threshold: int
    ring: Ring

    def __post_init__(self) -> None:
        count = len(self.silos)
        if len(set(self.silos)) != count or count < 2:
            raise ConfigError(f"a secure sum takes at least 2 silos of different names, not {list(self.silos)}")
        if not count < 2 * self.threshold <= 2 * count:
            raise ConfigError(
                f"a secure sum of {count} silos with threshold {self.threshold}: more than half of them must stay, "
                "or the server could take two sums from one round"
            )

    def place(self, silo: str) -> int:
        """A silo's number among the sum's, from 1."""
        return self.silos.index(silo) + 1

    @cached_property
    def digest(self) -> bytes:
        """Of all that was agreed on: who has agreed on something else understands nothing that is said here."""
        told = [self.session, self.silos, self.threshold, self.ring.size, self.ring.bits]
        return sha256(json.dumps(told).encode()).digest()

    def keys_words(self, silo: str, keys: bytes) -> bytes:
        """What a silo signs of its fresh keys."""
        return b"/".join((PREFIX + b"keys", self.digest, silo.encode(), keys))

    def list_words(self, silos: Iterable[str]) -> bytes:
        """What a silo signs of the list of those whose numbers have come."""
        return b"/".join((PREFIX + b"list", self.digest, listed(silos)))

    def require(self, silos: Iterable[str], what: str) -> tuple[str, ...]:
        """These silos in the sum's order, if they are of it and enough."""
        came = set(silos)
        if foreign := sorted(came - set(self.silos)):
            raise SecureSumError(f"silo '{foreign[0]}' has no part in this sum")
        if len(came) < self.threshold:
            raise SecureSumError(f"{len(came)} of {len(self.silos)} silos {what}; {self.threshold} are needed")
        return tuple(silo for silo in self.silos if silo in came)


def listed(silos: Iterable[str]) -> bytes:
    """Names as bytes that no other list of names has."""
    return json.dumps(sorted(silos)).encode()


def names_in(data: bytes) -> tuple[str, ...]:
    """The inverse of :func:`listed`."""
    try:
        names = json.loads(data)
    except ValueError as error:
        raise SecureSumError(f"a list of silos cannot be read: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or names != sorted(set(names)):
        raise SecureSumError("a list of silos is not one of different names in order")
    return tuple(names)


def part_of(parts: Mapping[str, bytes], name: str, silo: str) -> bytes:
    """A part that a message must have."""
    if name not in parts:
        raise SecureSumError(f"a message about silo '{silo}' lacks '{name}'")
    return parts[name]
