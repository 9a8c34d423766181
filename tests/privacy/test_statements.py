"""Bundles of signed statements: whatever is changed in one is found, and what an honest one says holds."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import ConfigError, FedloomError
from fedloom.privacy.accounting import NoGuarantee, default_delta, spent, to_mapping
from fedloom.privacy.accounts import ChargedRelease
from fedloom.privacy.ledger import Ledger
from fedloom.privacy.signatures import ORDER, fingerprint, is_signed, public_line, read_private_key, sign
from fedloom.privacy.statement_body import accountant_for
from fedloom.privacy.statements import (
    DOMAIN,
    Bundle,
    Statement,
    bundle_of,
    canonical,
    digest_of,
    read_bundle,
    signed_statement,
    verify,
)
from statement_samples import (
    ASKED,
    CHARTER,
    NOW,
    SILOS,
    UNITS,
    experiment,
    key_of,
    line_of,
    pins,
    sample_bundle,
    statement_of,
    unsigned_bundle,
)

BUNDLE = sample_bundle()
DATA = BUNDLE.to_bytes()
EAST, WEST = SILOS


def sentences(bundle: Bundle, silo: str = EAST, now: datetime = NOW) -> list[str]:
    return [flaw.sentence for flaw in verify(bundle, pins(), now) if flaw.silo == silo]


def test_an_honest_bundle_holds_and_says_what_its_charges_cost(tmp_path: Path) -> None:
    path = tmp_path / "statements.json"
    path.write_bytes(DATA)
    assert read_bundle(path) == BUNDLE
    assert verify(BUNDLE, pins(), NOW) == verify(BUNDLE, now=NOW) == []
    for statement in BUNDLE.statements:
        body = statement.body
        assert body.epsilon == spent(body.events, default_delta(UNITS), "pld")
        assert body.key == pins()[body.silo]


def detected(data: bytes) -> bool:
    try:
        return verify(bundle_of(data), now=NOW) != []
    except FedloomError:
        return True


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
@settings(max_examples=400)
def test_a_change_of_any_byte_is_detected(position: int, change: int) -> None:
    assert detected(DATA[:position] + bytes([DATA[position] ^ change]) + DATA[position + 1 :])


def test_the_other_case_of_a_letter_or_the_next_digit_is_detected_everywhere() -> None:
    """Changes that leave a bundle well-formed, at every seventh position."""
    for position in range(0, len(DATA), 7):
        byte = DATA[position : position + 1]
        other = b"%d" % ((int(byte) + 1) % 10) if byte.isdigit() else byte.swapcase()
        assert other == byte or detected(DATA[:position] + other + DATA[position + 1 :]), position


@given(st.integers(0, len(DATA)), st.binary(min_size=1, max_size=4))
def test_what_is_put_in_or_cut_off_is_detected(position: int, more: bytes) -> None:
    assert detected(DATA[:position] + more + DATA[position:])
    assert position == len(DATA) or detected(DATA[:position])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything in a tree of plain values."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in places(each, (*path, key)))]


JUNK = (None, True, -1, 0.5, 10**400, "", "x", [], {}, [[]], {"a": []})
WORDS = places(dict(BUNDLE.statements[0].words))[1:]
TREE = [path for path in places(json.loads(DATA))[1:] if path[0] != "statements"]


def put(tree: Any, path: tuple[Any, ...], value: object) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


@given(st.sampled_from(WORDS), st.sampled_from(JUNK))
@settings(max_examples=300)
def test_nonsense_that_a_silo_signs_is_a_sentence_and_no_crash(path: tuple[Any, ...], junk: object) -> None:
    words = json.loads(canonical(BUNDLE.statements[0].words))
    put(words, path, junk)
    if path == ("silo",):
        return  # then it is another silo's
    words = {**words, "key": pins()[EAST]}
    signed = Statement(words, sign(DOMAIN + canonical(words), key_of(EAST)).hex())
    with contextlib.suppress(FedloomError):
        verify(bundle_of(in_place_of(EAST, signed, line_of(EAST)).to_bytes()), now=NOW)


@given(st.sampled_from(TREE), st.sampled_from(JUNK))
@settings(max_examples=200)
def test_nonsense_around_the_statements_is_detected_and_no_crash(path: tuple[Any, ...], junk: object) -> None:
    tree = json.loads(DATA)
    put(tree, path, junk)
    assert detected(canonical(tree) + b"\n") or tree == json.loads(DATA)


def without(silo: str) -> Bundle:
    keys = {name: key for name, key in BUNDLE.keys.items() if name != silo}
    return replace(BUNDLE, keys=keys, statements=tuple(each for each in BUNDLE.statements if each.silo != silo))


def in_place_of(silo: str, statement: Statement, key: str) -> Bundle:
    """Without putting them in order."""
    statements = tuple(statement if each.silo == silo else each for each in BUNDLE.statements)
    return replace(BUNDLE, keys={**BUNDLE.keys, silo: key}, statements=statements)


def of_another_run(**changes: Any) -> Bundle:
    return in_place_of(EAST, statement_of(replace(unsigned_bundle(), **changes), EAST), line_of(EAST))


def dropped(number: int, *keys: str) -> Callable[[dict[str, Any]], None]:
    """A round that a silo keeps silent about."""

    def change(words: dict[str, Any]) -> None:
        for key in keys:
            words[key] = [row for row in words[key] if row["round"] != number]

    return change


def stating(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda words: words.update(changes)


def charged(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda words: words["charges"][0].update(changes)


def foreign() -> Bundle:
    """Another silo's key, with a signature of its own."""
    words = {**BUNDLE.statements[0].words}
    return in_place_of(EAST, signed_statement(words, key_of(WEST)), line_of(WEST))


def borrowed() -> Bundle:
    """The right key, beside a signature of another one."""
    words = {**BUNDLE.statements[0].words}
    return in_place_of(EAST, Statement(words, sign(DOMAIN + canonical(words), key_of(WEST)).hex()), line_of(EAST))


def mirrored() -> Bundle:
    """(r, n - s), which holds wherever (r, s) does, as far as ECDSA is concerned."""
    statement = BUNDLE.statements[0]
    r, s = statement.signature[:96], int(statement.signature[96:], 16)
    return in_place_of(EAST, replace(statement, signature=r + f"{ORDER - s:096x}"), line_of(EAST))


def bare() -> Bundle:
    """Signed without saying what it is."""
    words = BUNDLE.statements[0].words
    return in_place_of(EAST, Statement(words, sign(canonical(words), key_of(EAST)).hex()), line_of(EAST))


OTHER_CHARTER = {**CHARTER, "name": "other"}
LOUDER = {"kind": "gaussian", "noise_multiplier": 1.0, "rate": 0.1, "steps": 5}
WRONG: dict[str, tuple[Callable[[], Bundle], str, str]] = {
    "silo missing": (
        lambda: without(EAST),
        "",
        "silo 'east' was drawn for rounds 1, 2 and there is no statement",
    ),
    "nobody": (unsigned_bundle, "", "silo 'west' was drawn for rounds 1, 2 and there is no statement"),
    "twice": (
        lambda: replace(BUNDLE, statements=(BUNDLE.statements[0], *BUNDLE.statements)),
        "",
        "its statements and keys must be one for each silo, in the order of their names",
    ),
    "a key too many": (
        lambda: replace(without(EAST), keys=BUNDLE.keys),
        "",
        "its statements and keys must be one for each silo, in the order of their names",
    ),
    "asked tomorrow": (
        lambda: replace(BUNDLE, asked="2026-03-02T12:00:00Z"),
        "",
        "it was asked for at 2026-03-02T12:00:00Z, which is yet to come",
    ),
    "took part undrawn": (
        lambda: replace(BUNDLE, participants={**BUNDLE.participants, "3": {EAST: "0" * 64}}),
        "",
        "silo 'east' is said to have taken part in round 3, for which it was not drawn",
    ),
    "another silo's key": (foreign, EAST, f"its key has the fingerprint {pins()[WEST]}, and {pins()[EAST]} is known"),
    "another silo's signature": (borrowed, EAST, "its signature does not belong to its words and its key"),
    "malleable": (mirrored, EAST, "its signature does not belong to its words and its key"),
    "bare": (bare, EAST, "its signature does not belong to its words and its key"),
    "another charter": (lambda: of_another_run(charter=OTHER_CHARTER), EAST, "it is a statement about another charter"),
    "another experiment": (
        lambda: of_another_run(experiment=experiment("seed=7")),
        EAST,
        "it is a statement about another experiment",
    ),
    "another run": (lambda: of_another_run(run="run-0"), EAST, "it is a statement about another run"),
    "replay": (
        lambda: of_another_run(asked="2026-02-01T11:00:00Z"),
        EAST,
        "it is a statement about another time of asking",
    ),
    "another account": (
        lambda: of_another_run(participants={}),
        EAST,
        "it is a statement about another account of who took part",
    ),
    "clock in the past": (
        lambda: sample_bundle({EAST: stating(date="2020-01-01T00:00:00Z")}),
        EAST,
        f"its date, 2020-01-01T00:00:00Z, lies before it was asked for, at {ASKED}",
    ),
    "before the federation": (
        lambda: sample_bundle({EAST: stating(founded="2026-04-01T00:00:00Z")}),
        EAST,
        "its date, 2026-03-01T11:00:05Z, lies before the federation was founded, at 2026-04-01T00:00:00Z",
    ),
    "clock in the future": (
        lambda: sample_bundle({EAST: stating(date="2027-01-01T00:00:00Z")}),
        EAST,
        "its date, 2027-01-01T00:00:00Z, is yet to come",
    ),
    "no time": (lambda: sample_bundle({EAST: stating(date="today")}), EAST, "its times cannot be read"),
    "round dropped": (
        lambda: sample_bundle({EAST: dropped(2, "charges", "left")}),
        EAST,
        "it states nothing of the update that the server took from it in round 2",
    ),
    "round unpaid": (
        lambda: sample_bundle({EAST: dropped(2, "charges")}),
        EAST,
        "something left in round 2, and no charge paid for it",
    ),
    "round counted tightly": (
        lambda: sample_bundle({EAST: dropped(2, "charges", "left")}),
        EAST,
        "its charges must be counted by 'filter', and are by 'pld'",
    ),
    "round undrawn": (
        lambda: sample_bundle({EAST: charged(round=3)}),
        EAST,
        "something left, or was charged, in round 3, for which it was not drawn",
    ),
    "left twice": (
        lambda: sample_bundle({EAST: lambda words: words["left"].append(words["left"][0])}),
        EAST,
        "what left is told twice, or of another silo",
    ),
    "second attempt": (
        lambda: sample_bundle({EAST: charged(attempt=1)}),
        EAST,
        "its charges must be counted by 'filter', and are by 'pld'",
    ),
    "small epsilon": (
        lambda: sample_bundle({EAST: stating(epsilon=0.1)}),
        EAST,
        "it states epsilon 0.1, and its charges cost 0.442",
    ),
    "less noise": (
        lambda: sample_bundle({EAST: charged(event=LOUDER)}),
        EAST,
        "it states epsilon 0.442, and its charges cost ",
    ),
    "rate": (
        lambda: sample_bundle({EAST: stating(units=50)}),
        EAST,
        "round 1 was charged at rate 0.1; 0.2 follows from its records",
    ),
    "units": (lambda: sample_bundle({EAST: stating(units=0)}), EAST, "it states 0 records, and the charter allows inf"),
    "delta": (
        lambda: sample_bundle({EAST: stating(delta=0.1)}),
        EAST,
        "its delta is 0.1, and 0.001 is what was",
    ),
    "unit": (
        lambda: sample_bundle({EAST: stating(unit="subject")}),
        EAST,
        "it protects each subject, and the experiment asks for each record",
    ),
    "mechanism": (
        lambda: sample_bundle({EAST: stating(mechanism="none", epsilon=None)}),
        EAST,
        "it states the mechanism 'none', and the experiment asks for 'dp-sgd'",
    ),
    "no guarantee": (lambda: sample_bundle(event=NoGuarantee("it is a test")), EAST, "no DP guarantee: it is a test"),
    "a filter without a bound": (
        lambda: sample_bundle({EAST: stating(accountant="filter", granted={"epsilon": None, "delta": 0.001})}),
        EAST,
        "no DP guarantee: nothing bounds its charges",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_of_the_right_silo(wrong: str) -> None:
    make, silo, beginning = WRONG[wrong]
    said = sentences(make(), silo)
    assert any(sentence.startswith(beginning) for sentence in said), said
    if silo:
        assert sentences(make(), WEST if wrong != "no guarantee" else "server") == []


def test_only_a_lack_of_guarantee_is_nothing_false() -> None:
    found = verify(sample_bundle(event=NoGuarantee("it is a test")), pins(), NOW)
    assert [(flaw.silo, flaw.unguarded) for flaw in found] == [(EAST, True), (WEST, True)]
    assert not any(flaw.unguarded for flaw in verify(sample_bundle({EAST: stating(epsilon=0.1)}), pins(), NOW))


def test_keys_that_a_server_makes_up_hold_together_and_are_not_those_that_people_compared() -> None:
    """Without pins a bundle says who signed it, not that they are the silos."""
    made = replace(BUNDLE, keys={}, statements=())
    for silo in SILOS:
        words = next(each.words for each in BUNDLE.statements if each.silo == silo)
        made = made.having(signed_statement(words, key_of("forger")), line_of("forger"))
    assert verify(made, now=NOW) == []
    assert [flaw.silo for flaw in verify(made, pins(), NOW)] == [EAST, WEST]
    assert [flaw.silo for flaw in verify(made, {WEST: pins()[WEST].replace(" ", "")}, NOW)] == [WEST]


@pytest.mark.parametrize("hours", [-0.9, 0.9])
def test_clocks_may_differ_a_little(hours: float) -> None:
    date = (datetime(2026, 3, 1, 11, tzinfo=UTC) + timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert sentences(sample_bundle({EAST: stating(date=date)}), now=datetime(2026, 3, 1, 11, tzinfo=UTC)) == []


@pytest.mark.parametrize(
    ("attempts", "release", "drawn", "accountant"),
    [
        ({1: 0, 2: 0}, "update", (1, 2), "pld"),
        ({1: 0}, "update", (1, 2), "filter"),  # the other round may have been left out after a look at this one
        ({1: 0, 2: 1}, "update", (1, 2), "filter"),
        ({1: 0}, "moments", (1, 2), "pld"),  # a statistic goes once
        ({}, "update", (1, 2), "pld"),
    ],
)
def test_the_tight_accountant_is_for_what_was_planned(
    attempts: dict[int, int], release: str, drawn: tuple[int, ...], accountant: str
) -> None:
    charges = [ChargedRelease(number, release, attempt, {}) for number, attempt in attempts.items()]
    assert accountant_for(charges, drawn) == accountant


ED25519 = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


@pytest.mark.parametrize("key", [key_of(EAST), ED25519], ids=["ecdsa", "ed25519"])
def test_either_type_of_key_signs_and_verifies(key: Any) -> None:
    words, line = {"silo": EAST}, public_line(key)
    signature = sign(canonical(words), key)
    assert is_signed(canonical(words), signature, line)
    assert not is_signed(canonical({"silo": WEST}), signature, line)
    assert not is_signed(canonical(words), signature[:-1], line)
    assert not is_signed(canonical(words), b"\0" + signature, line)
    assert not is_signed(canonical(words), signature, public_line(key_of(WEST)))
    assert not is_signed(canonical(words), signature, b"no key")
    assert signed_statement(words, key).words["key"] == fingerprint(line)


@pytest.mark.parametrize("number", range(8))
def test_of_two_signatures_the_lower_one_is_made_and_accepted(number: int) -> None:
    data = bytes([number])
    signature = sign(data, key_of(EAST))
    r, s = signature[:48], int.from_bytes(signature[48:])
    assert s <= ORDER // 2
    assert is_signed(data, signature, line_of(EAST).encode())
    assert not is_signed(data, r + (ORDER - s).to_bytes(48), line_of(EAST).encode())


def test_a_key_of_another_curve_signs_nothing() -> None:
    from cryptography.hazmat.primitives import serialization as form

    key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(ConfigError, match="ECDSA by P-384 and Ed25519 are allowed"):
        read_private_key(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    assert not is_signed(b"", bytes(96), public_line(key))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "this is no bundle of statements"),
        (b"[]", "this is no bundle of statements"),
        (b"[" * 10**5, "this is no bundle of statements"),
        (DATA.replace(b'"schema":1', b'"schema":2'), "its schema is 2, this version reads 1"),
        (DATA[:-1], "not written as fedloom writes it"),
        (DATA.replace(b'"units":100', b'"units":"100"'), "units = '100' must be a whole number"),
        (DATA.replace(b'"kind":"gaussian"', b'"kind":"magic"'), "unknown privacy event 'magic'"),
        (DATA.replace(b'"units":100', b'"units":NaN'), "this is no bundle of statements"),
    ],
    ids=["empty", "list", "deep", "schema", "newline", "type", "event", "nan"],
)
def test_what_is_no_bundle_is_said_in_a_sentence(tmp_path: Path, data: bytes, complaint: str) -> None:
    path = tmp_path / "statements.json"
    path.write_bytes(data)
    with pytest.raises(FedloomError, match=complaint):
        read_bundle(path)
    with pytest.raises(FedloomError, match="cannot read"):
        read_bundle(tmp_path / "nothing.json")


def test_a_charter_that_names_no_silos_is_a_finding() -> None:
    (flaw,) = verify(replace(BUNDLE, charter={}), now=NOW)
    assert flaw.sentence.startswith("the charter, the experiment or the time of asking cannot be read")


def test_a_ledger_tells_the_charges_of_one_run(tmp_path: Path) -> None:
    from fedloom.privacy.accounting import Budget, Gaussian

    ledger, event = Ledger(tmp_path / "ledger.sqlite"), Gaussian(2.0, 0.1, 5)
    ledger.enrol(EAST, "data", Budget(math.inf, 1e-5))
    paid = ledger.charge("run-1", EAST, 1, "update", event, content=None)
    ledger.finish(paid, digest_of("bytes"))
    ledger.charge("run-2", EAST, 1, "update", event, content=None)
    ledger.charge("run-1", EAST, 1, "update", event, content=None)
    assert ledger.charges("run-1", EAST) == [
        ChargedRelease(1, "update", 0, to_mapping(event), digest_of("bytes")),
        ChargedRelease(1, "update", 1, to_mapping(event), ""),
    ]
    assert ledger.charges("run-1", WEST) == []
    assert json.loads(canonical({"e": to_mapping(event)}))["e"] == to_mapping(event)
    ledger.close()
