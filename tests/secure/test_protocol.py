"""Secure sums: exact whoever leaves when, nothing below the threshold, and nothing told but the sum."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from discrete_noise import chances, surprise
from fedloom.errors import ConfigError
from fedloom.privacy.grids import SharedSum
from fedloom.privacy.noise import NoiseKey, SecureNoise
from fedloom.privacy.trust import Distributed
from fedloom.secure.party import Party, agreed, own_mask
from fedloom.secure.shamir import joined
from fedloom.secure.terms import Parts, SecureSumError, Terms, Turn
from fedloom.secure.words import AT_ONCE, Ring
from secure_rounds import Round, answer, genuine, key_of, parties_of, random_values, terms_of

TURNS = list(Turn)


def expected(terms: Terms, leaves: Mapping[str, Turn]) -> set[str] | None:
    """Who is in the sum, counted by hand; None where too few are left at some stage."""
    left = {
        stage: [s for s in terms.silos if s not in leaves or TURNS.index(leaves[s]) > at]
        for at, stage in enumerate(TURNS)
    }
    return None if any(len(silos) < terms.threshold for silos in left.values()) else set(left[Turn.MASKED])


def check(terms: Terms, leaves: Mapping[str, Turn]) -> bool:
    """Whether there was a sum; it is the right one, or there is none where there must not be."""
    round = Round(terms, random_values(terms), leaves)
    if (present := expected(terms, leaves)) is None:
        with pytest.raises(SecureSumError, match="are needed"):
            round.carried_out()
        assert sum(stage is Turn.REVEAL for stage, _ in round.sent) < terms.threshold  # so no mask is taken away
        return False
    found = round.carried_out()
    assert set(found.present) == present
    assert np.array_equal(found.total, sum(round.values[silo] for silo in present))
    return True


def test_three_silos_in_every_pattern_of_leaving() -> None:
    terms = terms_of(3, 2)
    patterns = list(itertools.product([None, *TURNS], repeat=3))
    summed = [check(terms, {s: at for s, at in zip(terms.silos, pattern, strict=True) if at}) for pattern in patterns]
    # Nobody leaves: 1. One of three leaves at one of five stages: 15. Two or three leave: too few are left.
    assert (len(summed), sum(summed)) == (216, 16)


HUNDRED = [pytest.param(100, 67, turn, marks=pytest.mark.system) for turn in TURNS]


@pytest.mark.parametrize(("silos", "threshold", "stage"), [*((10, 7, turn) for turn in TURNS), *HUNDRED])
def test_as_many_leave_as_may_and_one_more(silos: int, threshold: int, stage: Turn) -> None:
    terms = terms_of(silos, threshold)
    order = np.random.default_rng(TURNS.index(stage)).permutation(terms.silos)
    assert check(terms, dict.fromkeys(order[: silos - threshold], stage))
    assert not check(terms, dict.fromkeys(order[: silos - threshold + 1], stage))


def test_ten_silos_of_which_up_to_three_leave_at_every_choice_of_stages() -> None:
    """All 56 ways to leave at five stages, up to three at a time; who leaves when is drawn. With a fourth, no sum."""
    terms, numbers = terms_of(10, 7), np.random.default_rng(1)
    choices = [stages for left in range(4) for stages in itertools.combinations_with_replacement(TURNS, left)]
    assert len(choices) == 56
    for stages in choices:
        assert check(terms, dict(zip(numbers.permutation(terms.silos), stages, strict=False)))
    for stages in choices[-35::5]:
        fourth = TURNS[numbers.integers(5)]
        assert not check(terms, dict(zip(numbers.permutation(terms.silos), (*stages, fourth), strict=False)))


def test_a_hundred_silos_of_which_a_third_leaves_bit_by_bit() -> None:
    terms, numbers = terms_of(100, 67), np.random.default_rng(2)
    stages = [TURNS[number] for number in numbers.integers(0, 5, 33)]
    assert set(stages) == set(TURNS)
    assert check(terms, dict(zip(numbers.permutation(terms.silos), stages, strict=False)))


@pytest.mark.parametrize("bits", [8, 20, 31, 32, 33, 64])
def test_numbers_of_any_width_come_back_whole(bits: int) -> None:
    """The largest and the smallest sum that the width holds, and -1; masks longer than what is made at once."""
    terms = terms_of(2, 2, size=2**18 + 3, bits=bits)
    most = 2 ** (bits - 2)
    one = np.full(terms.ring.size, -most)
    one[:2] = most - 1, -1
    other = one.copy()
    other[1] = 0
    total = Round(terms, dict(zip(terms.silos, (one, other), strict=True))).carried_out().total
    assert total[:3].tolist() == [2 * most - 2, -1, -2 * most]
    assert (total[2:] == -2 * most).all()


def test_a_masked_message_is_uniform() -> None:
    """Of 2000 messages of the same numbers: every byte is as frequent as others, and every bit of a coordinate."""
    terms = terms_of(2, 2, size=1000, bits=32)
    counts, bits = np.zeros(256), np.zeros(32)
    for _ in range(2000):
        party, other = parties_of(terms).values()
        roster = {}
        for silo, each in zip(terms.silos, (party, other), strict=True):
            keys = each.keys()
            roster[silo] = keys["keys"] + keys["signature"]
        letter = other.shares(roster)[terms.silos[0]]
        party.shares(roster)
        sent = party.masked({terms.silos[1]: letter}, np.zeros(1000, np.int64))["values"]
        counts += np.bincount(np.frombuffer(sent, np.uint8), minlength=256)
        bits += np.unpackbits(np.frombuffer(sent[:4], np.uint8))
    chance = counts.sum() / 256
    assert ((counts - chance) ** 2 / chance).sum() < 255 + 6 * np.sqrt(2 * 255)
    assert (np.abs(bits - 1000) < 6 * np.sqrt(500)).all()


def view(values: Mapping[str, np.ndarray], terms: Terms) -> np.ndarray:
    """What the server, which colludes with s000, sees of the others: their masked messages, and the sum of both."""
    round = Round(terms, values)
    total = round.carried_out().total
    honest = [terms.ring.unpacked(round.sent[Turn.MASKED, silo]["values"]) for silo in terms.silos[1:]]
    return np.array([*honest[0][:1], *honest[1][:1], total[0] - values["s000"][0]]) % 2**terms.ring.bits


def test_colluders_learn_the_sum_of_the_others_and_no_more() -> None:
    """Two sets of numbers with one sum: each message looks alike, and so does their relation, but for the sum."""
    terms = terms_of(3, 3, size=1, bits=8)
    one, other = ({"s000": np.array([5]), "s001": np.array([a]), "s002": np.array([b])} for a, b in ((3, 4), (-20, 27)))
    seen = [np.array([view(values, terms) for _ in range(320)]) for values in (one, other)]
    for views in seen:
        assert (views[:, 2] == 7).all()
        for column in (views[:, 0], views[:, 1], (views[:, 0] + views[:, 1]) % 256):
            counts = np.bincount((column // 16).astype(int), minlength=16)
            assert ((counts - 320 / 16) ** 2 / (320 / 16)).sum() < 15 + 6 * np.sqrt(30)


def test_two_sums_share_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same numbers in two rounds nothing is equal; with masks used twice, as is planted here, all would be."""
    terms = [terms_of(3, 2, size=64, session=f"run/{number}") for number in (1, 2)]
    values = random_values(terms[0])

    def sent() -> list[np.ndarray]:
        rounds = [Round(each, values) for each in terms]
        for round in rounds:
            round.carried_out()
        return [rounds[0].terms.ring.unpacked(round.sent[Turn.MASKED, "s001"]["values"]) for round in rounds]

    assert (np.not_equal(*sent())).mean() > 0.95
    monkeypatch.setattr("fedloom.secure.words.Ring.mask", lambda *_, **__: None)
    assert np.array_equal(*sent())


def test_no_stretch_of_a_mask_comes_back() -> None:
    """What is summed lies in one vector, block after block: one mask covers all of it, made piece by piece."""
    ring = Ring(3 * AT_ONCE, 32)
    words = ring.zeros()
    ring.mask(words, bytes(32))
    pieces = words.reshape(3, AT_ONCE)
    for one, other in itertools.combinations(pieces, 2):
        assert (one == other).mean() < 1e-3
    ring.mask(words, bytes(32), minus=True)
    assert not words.any()


def test_even_the_same_keys_make_other_masks_in_another_sum() -> None:
    one, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    public = other.public_key().public_bytes_raw()
    first, second = terms_of(3, 2), terms_of(3, 2, session="run/1/other block")
    assert agreed(one, public, "mask", first) == agreed(other, one.public_key().public_bytes_raw(), "mask", first)
    seeds = {agreed(one, public, use, terms) for use in ("mask", "letter") for terms in (first, second)}
    assert len(seeds | {own_mask(bytes(32), first), own_mask(bytes(32), second)}) == 6


def test_a_silo_answers_each_stage_once_and_in_order() -> None:
    """Asked for its numbers twice, a silo would cover two vectors with one mask."""
    terms = terms_of(2, 2)
    parties = parties_of(terms)
    roster = {silo: b"".join(party.keys().values()) for silo, party in parties.items()}
    letters = {silo: party.shares(roster) for silo, party in parties.items()}
    party = parties["s000"]
    party.masked({"s001": letters["s001"]["s000"]}, np.zeros(8, np.int64))
    for stage in (Turn.KEYS, Turn.SHARES, Turn.MASKED, Turn.REVEAL):
        with pytest.raises(SecureSumError, match=f"is asked for '{stage}' after"):
            answer(party, stage, {"s001": letters["s001"]["s000"]}, np.zeros(8, np.int64))


QUIET = SharedSum(bits=20, trust=Distributed(4, tolerated=1), units=40, bound=1.0, multiplier=0.01, size=2)


@pytest.mark.parametrize(("faulty", "honest"), [("", True), ("a share too small", False), ("no noise", False)])
def test_an_unmasked_sum_has_the_stated_noise(faulty: str, honest: bool) -> None:
    """By chi-square over 60,000 numbers: of 4 silos' noise the variances add up, and one silo's lack shows."""
    grid, source = replace(QUIET.grid(), exponent=0, sigma=4.0), SecureNoise().words(NoiseKey(0, 1, 0, "test"))
    terms = terms_of(4, 3, size=60_000, bits=20)
    totals = {silo: np.random.default_rng(number).integers(-9, 10, 60_000) for number, silo in enumerate(terms.silos)}
    values = {silo: grid.integers(torch.from_numpy(own), 10, source) for silo, own in totals.items()}
    if faulty == "a share too small":
        values["s001"] = replace(grid, sigma=2.0).integers(torch.from_numpy(totals["s001"]), 10, source)
    elif faulty == "no noise":
        values["s001"] = totals["s001"]
    noise = Round(terms, values).carried_out().total - sum(totals.values())
    assert (surprise(noise, chances(4.0 * 2, 100)) > 1e-9) == honest


def fake_key(stage: Turn, silo: str, parts: Parts) -> Parts:
    """The server puts a key of its own into the roster that s000 is shown."""
    if stage is Turn.SHARES and silo == "s000":
        parts["s001"] = bytes(64) + parts["s001"][64:]
    return parts


def foreign_letter(stage: Turn, silo: str, parts: Parts) -> Parts:
    if stage is Turn.MASKED and silo == "s000":
        parts["s001"] = parts["s002"]
    return parts


def other_list(stage: Turn, silo: str, parts: Parts) -> Parts:
    """The server tells s000 that s002 left, to get the share of its key, while others give that of its mask."""
    if stage is Turn.CONSENT and silo == "s000":
        parts["present"] = b'["s000", "s001", "s003"]'
    return parts


def few_signatures(stage: Turn, silo: str, parts: Parts) -> Parts:
    return {"s000": parts["s000"], "s001": parts["s001"]} if stage is Turn.REVEAL else parts


@pytest.mark.parametrize(
    ("touched", "complaint"),
    [
        (fake_key, "the keys of silo 's001' are not signed"),
        (foreign_letter, "the letter of silo 's001' was not written for this sum"),
        (other_list, "has not signed the list"),
        (few_signatures, "2 of 4 silos signed the list; 3 are needed"),
    ],
)
def test_a_server_that_plays_silos_against_each_other_is_found_out(touched: object, complaint: str) -> None:
    terms = terms_of(4, 3)
    with pytest.raises(SecureSumError, match=complaint):
        Round(terms, random_values(terms), touched=touched).carried_out()  # type: ignore[arg-type]


def test_a_silo_that_is_told_another_list_gives_nothing_away() -> None:
    """Even if the server took the signature under the other list: the silo wants enough under its own."""
    terms = terms_of(3, 2)
    parties = parties_of(terms)
    roster = {silo: b"".join(party.keys().values()) for silo, party in parties.items()}
    letters = {silo: party.shares(roster) for silo, party in parties.items()}
    for silo, party in parties.items():
        party.masked({s: letters[s][silo] for s in terms.silos if s != silo}, np.zeros(8, np.int64))
    lists = {"s000": b'["s000", "s001"]', "s001": b'["s000", "s001", "s002"]', "s002": b'["s000", "s001", "s002"]'}
    signatures = {silo: parties[silo].consent({"present": lists[silo]})["signature"] for silo in terms.silos}
    with pytest.raises(SecureSumError, match="silo 's001' has not signed the list that silo 's000' was shown"):
        parties["s000"].reveal({silo: signatures[silo] for silo in ("s000", "s001")})


def test_numbers_of_a_silo_that_is_said_to_have_left_stay_hidden() -> None:
    """The server has s002's message, tells all others that it never came, and gets its key: its own mask is left."""
    terms = terms_of(3, 2, size=64)
    parties = parties_of(terms)
    sent = {silo: party.keys() for silo, party in parties.items()}
    roster = {silo: b"".join(keys.values()) for silo, keys in sent.items()}
    letters = {silo: party.shares(roster) for silo, party in parties.items()}
    values = random_values(terms)
    came = {
        silo: party.masked({s: letters[s][silo] for s in terms.silos if s != silo}, values[silo])["values"]
        for silo, party in parties.items()
    }
    there = ("s000", "s001")
    signed = {silo: parties[silo].consent({"present": b'["s000", "s001"]'})["signature"] for silo in there}
    shares = {terms.place(silo): parties[silo].reveal(signed)["s002"] for silo in there}
    key = X25519PrivateKey.from_private_bytes(joined(shares, 2))
    assert key.public_key().public_bytes_raw() == sent["s002"]["keys"][32:]
    words = terms.ring.unpacked(came["s002"]).copy()
    for silo in there:  # s002 took these away, being the last in the order
        terms.ring.mask(words, agreed(key, sent[silo]["keys"][32:], "mask", terms))
    assert (terms.ring.integers(words) != values["s002"]).mean() > 0.9


def test_a_share_of_both_secrets_of_a_silo_is_never_given() -> None:
    terms = terms_of(3, 2)
    round = Round(terms, random_values(terms), {"s002": Turn.MASKED})
    round.carried_out()
    for silo in ("s000", "s001"):
        sizes = {name: len(share) for name, share in round.sent[Turn.REVEAL, silo].items()}
        assert sizes == dict.fromkeys(terms.silos, 66)


@pytest.mark.parametrize(("silos", "threshold"), [(1, 1), (4, 2), (4, 5), (3, 1)])
def test_a_threshold_that_would_let_the_server_take_two_sums_is_refused(silos: int, threshold: int) -> None:
    with pytest.raises(ConfigError, match="a secure sum"):
        terms_of(silos, threshold)


def test_a_silo_of_no_sum_takes_no_part() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        Party(terms_of(3, 2), "s007", key_of("s007").sign, genuine)
