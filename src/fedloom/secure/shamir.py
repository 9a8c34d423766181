"""Shares of a secret of which fewer than a threshold tell nothing (Shamir, "How to Share a Secret", 1979)."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache

from fedloom.errors import FedloomError

PRIME = 2**521 - 1  # Mersenne's thirteenth: secrets of 32 bytes fit with room to spare
SECRET, SHARE = 32, 66  # bytes


def divided(secret: bytes, places: Iterable[int], threshold: int) -> dict[int, bytes]:
    """A share for each place, which is a number from 1: the value there of a polynomial that is the secret at 0."""
    if len(secret) != SECRET:
        raise FedloomError(f"a secret of {len(secret)} bytes cannot be shared; {SECRET} are allowed")
    polynomial = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = {}
    for place in places:
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * place + coefficient) % PRIME
        shares[place] = value.to_bytes(SHARE)
    return shares


def joined(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from as many shares as the threshold; more are not looked at."""
    if len(shares) < threshold:
        raise FedloomError(f"{len(shares)} shares do not give a secret that takes {threshold}")
    chosen = tuple(sorted(shares)[:threshold])
    value = sum(int.from_bytes(shares[place]) * weight for place, weight in _weights(chosen).items()) % PRIME
    if value >> (8 * SECRET):
        raise FedloomError("shares do not belong to one secret")
    return value.to_bytes(SECRET)


@lru_cache(maxsize=4)  # the same silos give shares of every secret of a sum
def _weights(places: tuple[int, ...]) -> dict[int, int]:
    """Lagrange's, at 0."""
    found = {}
    for place in places:
        above, below = 1, 1
        for other in places:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        found[place] = above * pow(below, -1, PRIME)
    return found
