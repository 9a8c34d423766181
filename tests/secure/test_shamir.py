"""Shares: any threshold of them give the secret, fewer tell nothing of it."""

from __future__ import annotations

import itertools
import secrets

import pytest

from fedloom.errors import FedloomError
from fedloom.secure import shamir
from fedloom.secure.shamir import PRIME, divided, joined


def test_any_threshold_of_shares_give_the_secret() -> None:
    secret = secrets.token_bytes(32)
    shares = divided(secret, range(1, 6), 3)
    for chosen in itertools.combinations(shares, 3):
        assert joined({place: shares[place] for place in chosen}, 3) == secret
    with pytest.raises(FedloomError, match="2 shares do not give a secret that takes 3"):
        joined({1: shares[1], 2: shares[2]}, 3)
    with pytest.raises(FedloomError, match="do not belong to one secret"):
        joined({1: shares[1], 2: shares[2], 3: divided(secret, [3], 3)[3]}, 3)
    with pytest.raises(FedloomError, match="31 bytes"):
        divided(bytes(31), [1], 1)


def test_a_line_through_a_share_meets_every_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """With threshold 2 a share at place 1 is secret + slope: for each secret there is one slope that gives it."""
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda _: 12345)
    assert int.from_bytes(divided((7).to_bytes(32), [1, 2], 2)[2]) == 7 + 2 * 12345
    share = 7 + 12345
    for other in (0, 1, 2**256 - 1):
        monkeypatch.setattr(shamir.secrets, "randbelow", lambda _, slope=(share - other) % PRIME: slope)
        assert int.from_bytes(divided(other.to_bytes(32), [1], 2)[1]) == share


def test_the_field_is_one() -> None:
    """2^521 - 1 is prime by Lucas and Lehmer: s -> s^2 - 2 from 4 comes to 0 after 519 steps."""
    number = 4
    for _ in range(519):
        number = (number * number - 2) % PRIME
    assert number == 0
