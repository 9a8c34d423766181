"""Signed statements: what each silo of a federation says that a run cost its data, and what left, for anybody to check.

A bundle is one file: what the server asked, and the silos' answers, each signed with the key by which the silo joins.
What may be in it, and how it is written, is here; :func:`verify` says whether it holds together.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedloom.config import Config
from fedloom.errors import FedloomError, MissingExtraError
from fedloom.privacy.accounting import NoGuarantee, default_delta
from fedloom.privacy.ledger import PRETRAINING, UPDATE, format_epsilon
from fedloom.privacy.statement_body import StatementBody, accountant_for, drawn_rounds, time_of
from fedloom.privacy.summary import NONE
from fedloom.settings import parse

SCHEMA = 1
DOMAIN = b"fedloom statement 1\n"  # begins what is signed, so that it can be taken for nothing else that a key signs

TOLERANCE = timedelta(hours=1)  # by which clocks may differ
DIGITS = 1e-6  # up to which another machine's arithmetic must find the same epsilon
NO_PINS: Mapping[str, str] = MappingProxyType({})


def canonical(value: Mapping[str, Any]) -> bytes:
    """The only way in which these values are written: what is signed is bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(value: Mapping[str, Any] | str) -> str:
    """By which statements name a charter, or the text of an experiment."""
    return sha256(value.encode() if isinstance(value, str) else canonical(value)).hexdigest()


@dataclass(frozen=True)
class Statement:
    """A body and its signature; what is signed is the body as it is written."""

    words: Mapping[str, Any]
    signature: str

    @cached_property
    def body(self) -> StatementBody:
        """The words, checked one by one."""
        return parse(StatementBody, _without_nulls(self.words))

    @property
    def silo(self) -> str:
        """Who states it."""
        return str(self.words["silo"])

    @property
    def signed(self) -> bytes:
        """The bytes that the signature is of."""
        return DOMAIN + canonical(self.words)

    def to_mapping(self) -> dict[str, Any]:
        """As it lies in the file."""
        return {"body": dict(self.words), "signature": self.signature}

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> Statement:
        """Read back what :meth:`to_mapping` gave; whether it is true is not asked here."""
        try:
            if set(mapping) != {"body", "signature"}:
                raise ValueError("it must have a body and a signature")
            found = cls(dict(mapping["body"]), str(mapping["signature"]))
            _ = found.signed, found.body.events
            return found
        except (FedloomError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise FedloomError(f"this is no statement: {error}") from error


def signed_statement(words: Mapping[str, Any], key: Any) -> Statement:
    """A statement by the holder of a private key."""
    from fedloom.privacy.signatures import fingerprint, public_line, sign

    unsigned = Statement({**words, "key": fingerprint(public_line(key))}, "")
    return replace(unsigned, signature=sign(unsigned.signed, key).hex())


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What the server asked at the end of a run, and what the silos answered."""

    charter: dict[str, Any]
    experiment: str  # TOML
    run: str
    asked: str
    participants: dict[str, dict[str, str]]  # round -> silo -> SHA-256 of what of it went into the model
    keys: dict[str, str]  # of those who answered, as OpenSSH writes them
    statements: tuple[Statement, ...] = ()

    @property
    def terms(self) -> dict[str, Any]:
        """What every statement must repeat, so that none can be moved elsewhere."""
        return {
            "charter": digest_of(self.charter),
            "experiment": digest_of(self.experiment),
            "run": self.run,
            "asked": self.asked,
            "participants": self.participants,
        }

    def having(self, statement: Statement, key: str) -> Bundle:
        """With one statement more, in place of an older one of the same silo."""
        others = [other for other in self.statements if other.silo != statement.silo]
        statements = tuple(sorted([*others, statement], key=lambda each: each.silo))
        return replace(self, keys={**self.keys, statement.silo: key}, statements=statements)

    def to_bytes(self) -> bytes:
        """The file."""
        tree = {
            "schema": SCHEMA,
            "charter": self.charter,
            "experiment": self.experiment,
            "run": self.run,
            "asked": self.asked,
            "participants": self.participants,
            "keys": self.keys,
            "statements": [statement.to_mapping() for statement in self.statements],
        }
        return canonical(tree) + b"\n"


def read_bundle(path: Path) -> Bundle:
    """The bundle in a file; :func:`verify` says whether it is true."""
    try:
        return bundle_of(path.read_bytes())
    except OSError as error:
        raise FedloomError(f"cannot read {path}: {error.strerror}") from error
    except FedloomError as error:
        raise FedloomError(f"{path}: {error}") from error


def bundle_of(data: bytes) -> Bundle:
    """Read back what :meth:`Bundle.to_bytes` gave, byte for byte; anything else is refused."""
    try:
        tree = json.loads(data)
        schema = tree.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"its schema is {schema}, this version reads {SCHEMA}")
        statements = tuple(Statement.of(each) for each in tree.pop("statements"))
        found = replace(parse(Bundle, tree), statements=statements)
        if found.to_bytes() != data:
            raise ValueError("it is not written as fedloom writes it, byte for byte")
    except (FedloomError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FedloomError(f"this is no bundle of statements: {error}") from error
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Flaw:
    """Something that is wrong with a bundle, or that it does not show."""

    silo: str  # empty: the bundle as a whole
    sentence: str
    unguarded: bool = False  # nothing is false: the statement itself says that there is no guarantee


def verify(bundle: Bundle, pins: Mapping[str, str] = NO_PINS, now: datetime | None = None) -> list[Flaw]:
    """All that is wrong with a bundle; nothing where it holds.

    Whoever made the bundle could have put keys of his own into it: ``pins`` are fingerprints of silos' keys as they are
    known from elsewhere. ``now`` is this machine's time, unless told.
    """
    try:
        config = parse(Config, tomllib.loads(bundle.experiment))
        silos = tuple(str(name) for name in dict(bundle.charter["silos"]))
        declared = {str(silo): int(count) for silo, count in dict(bundle.charter["records"]).items()}
        asked = time_of(bundle.asked)
    except (FedloomError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        return [Flaw("", f"the charter, the experiment or the time of asking cannot be read: {error}")]
    drawn = drawn_rounds(config, silos)
    now = now or datetime.now(UTC)
    found = [Flaw("", sentence) for sentence in _whole(bundle, drawn)]
    if asked > now + TOLERANCE:
        found.append(Flaw("", f"it was asked for at {bundle.asked}, which is yet to come"))
    for statement in bundle.statements:
        verification = _Verification(bundle, config, drawn, declared, statement.body, now)
        sentences = _forgery(bundle, statement, pins) or list(verification.sentences())
        found += [Flaw(statement.silo, each, unguarded=each.startswith(NONE)) for each in sentences]
    return found


def _whole(bundle: Bundle, drawn: Mapping[str, list[int]]) -> Iterator[str]:
    """What is wrong with the bundle itself, such as a silo that is missing."""
    names = [statement.silo for statement in bundle.statements]
    if names != sorted(set(names)) or set(names) != set(bundle.keys):
        yield "its statements and keys must be one for each silo, in the order of their names"
    for silo, rounds in drawn.items():
        if rounds and silo not in names:
            yield f"silo '{silo}' was drawn for {_rounds(rounds)} and there is no statement of it"
    for silo in sorted(set(names) - set(drawn)):
        yield f"silo '{silo}' is none of the charter's"
    for number, came in bundle.participants.items():
        for silo in came:
            if number not in map(str, drawn.get(silo, [])):
                yield f"silo '{silo}' is said to have taken part in round {number}, for which it was not drawn"


def _forgery(bundle: Bundle, statement: Statement, pins: Mapping[str, str]) -> list[str]:
    """Why nothing that is said need be believed: it was signed by nobody, or by somebody else."""
    from fedloom.privacy.signatures import fingerprint, is_signed

    line = bundle.keys.get(statement.silo, "").encode()
    own, pin = fingerprint(line), pins.get(statement.silo)
    if pin is not None and "".join(pin.split()).lower() != "".join(own.split()):
        return [f"its key has the fingerprint {own}, and {pin} is known to be its own"]
    if statement.body.key != own:
        return [f"it states the key {statement.body.key}, and {own} is the one beside it"]
    try:
        signature = bytes.fromhex(statement.signature)
    except ValueError:
        return ["its signature is not written in hexadecimal digits"]
    if signature.hex() != statement.signature or not is_signed(statement.signed, signature, line):
        return ["its signature does not belong to its words and its key"]
    return []


@dataclass(frozen=True)
class _Verification:
    """One statement whose signature holds, beside all that is known of the run."""

    bundle: Bundle
    config: Config
    drawn: Mapping[str, list[int]]
    declared: Mapping[str, int]  # the most records that each silo may claim; empty: nobody said
    body: StatementBody
    now: datetime

    def sentences(self) -> Iterator[str]:
        """All that is wrong with it."""
        for name, value in self.bundle.terms.items():
            if getattr(self.body, name) != value:
                yield f"it is a statement about another {TERMS[name]}"
        yield from self._times()
        yield from self._rounds()
        yield from self._charges()
        yield from self._epsilon()

    def _times(self) -> Iterator[str]:
        try:
            asked, founded, date = map(time_of, (self.bundle.asked, self.body.founded, self.body.date))
        except ValueError as error:
            yield f"its times cannot be read: {error}"
            return
        if date < asked - TOLERANCE:
            yield f"its date, {self.body.date}, lies before it was asked for, at {self.bundle.asked}"
        if date < founded - TOLERANCE:
            yield f"its date, {self.body.date}, lies before the federation was founded, at {self.body.founded}"
        if date > self.now + TOLERANCE:
            yield f"its date, {self.body.date}, is yet to come"

    def _rounds(self) -> Iterator[str]:
        """What left, beside what the draw allowed, what was paid for, and what the server took."""
        body, drawn = self.body, set(map(str, self.drawn.get(self.body.silo, [])))
        charged, private = {str(charge.round) for charge in body.charges}, body.mechanism != "none"
        for number in sorted({str(row.get("round")) for row in body.left} | charged):
            if number not in drawn:
                yield f"something left, or was charged, in round {number}, for which it was not drawn"
            elif private and number not in charged:
                yield f"something left in round {number}, and no charge paid for it"
        left = {(str(row.get("round")), str(row.get("sha256"))) for row in body.left if row.get("silo") == body.silo}
        if len(left) != len(body.left):
            yield "what left is told twice, or of another silo"
        for number, came in self.bundle.participants.items():
            if body.silo in came and (number, came[body.silo]) not in left:
                yield f"it states nothing of the update that the server took from it in round {number}"

    def _charges(self) -> Iterator[str]:
        """The settings and charges, beside the experiment."""
        body, asked = self.body, self.config.privacy
        if body.mechanism != asked.mechanism:
            yield f"it states the mechanism '{body.mechanism}', and the experiment asks for '{asked.mechanism}'"
        if body.mechanism == "none":
            return
        if body.unit != asked.unit:
            yield f"it protects each {body.unit}, and the experiment asks for each {asked.unit}"
        most = self.declared.get(body.silo, math.inf)
        if not 0 < body.units <= most:
            yield f"it states {body.units} {body.unit}s, and the charter allows {most}"
            return
        wanted = accountant_for(body.charges, self.drawn.get(body.silo, []))
        if body.accountant != wanted:
            yield f"its charges must be counted by '{wanted}', and are by '{body.accountant}'"
        delta = body.granted.delta if wanted == "filter" else asked.delta or default_delta(body.units)
        if body.delta != delta:
            yield f"its delta is {body.delta:g}, and {delta:g} is what was agreed"
        rate = self.config.local.batch_size / body.units
        for charge, event in zip(body.charges, body.events, strict=True):
            if charge.release not in (UPDATE, PRETRAINING) or isinstance(event, NoGuarantee):
                continue
            if not math.isclose(event.rate, rate, rel_tol=DIGITS):
                yield f"round {charge.round} was charged at rate {event.rate:g}; {rate:g} follows from its {body.unit}s"

    def _epsilon(self) -> Iterator[str]:
        """The figure, recomputed."""
        body = self.body
        if body.mechanism == "none":
            yield f"{NONE}: the experiment asks for no mechanism"
            return
        try:
            reasons = [event.reason for event in body.events if isinstance(event, NoGuarantee)]
            counted = body.counted
        except MissingExtraError:
            raise
        except (FedloomError, ValueError, ArithmeticError) as error:
            yield f"its charges cannot be counted: {error}"
            return
        if math.isinf(counted):
            yield f"{NONE}: {(reasons or ['nothing bounds its charges'])[0]}"
        if not math.isclose(body.epsilon, counted, rel_tol=DIGITS):
            yield f"it states epsilon {format_epsilon(body.epsilon)}, and its charges cost {format_epsilon(counted)}"


TERMS = {
    "charter": "charter",
    "experiment": "experiment",
    "run": "run",
    "asked": "time of asking",
    "participants": "account of who took part",
}


def _rounds(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"round {listed}" if len(numbers) == 1 else f"rounds {listed}"
