"""Bundles of signed statements as a small federation would make them, without one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fedloom.config import load_config
from fedloom.privacy.accounting import Budget, Event, Gaussian, default_delta, to_mapping
from fedloom.privacy.accounts import ChargedRelease
from fedloom.privacy.signatures import fingerprint, public_line
from fedloom.privacy.statements import Bundle, Statement, digest_of, signed_statement

SILOS, UNITS, ROUNDS = ("east", "west"), 100, 2
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
FOUNDED, ASKED, DATE = "2026-01-01T00:00:00Z", "2026-03-01T11:00:00Z", "2026-03-01T11:00:05Z"
CHARTER: dict[str, Any] = {
    "name": "fed",
    "address": "localhost:8443",
    "shape": [1, 28, 28],
    "modality": "",
    "classes": [],
    "silos": dict.fromkeys(SILOS, "all"),
    "records": {},
    "wire": "direct",
}
PRIVATE = ("privacy.mechanism=dp-sgd", "privacy.epsilon=8.0", "local.batch_size=10", f"rounds={ROUNDS}")
Change = Callable[[dict[str, Any]], object]


@cache
def key_of(silo: str) -> ec.EllipticCurvePrivateKey:
    """A silo's key, the same in every run of the tests."""
    return ec.derive_private_key(int.from_bytes(silo.encode()) + 2, ec.SECP384R1())


def line_of(silo: str) -> str:
    """Its public half."""
    return public_line(key_of(silo)).decode()


def pins() -> dict[str, str]:
    """The fingerprints of all silos' keys."""
    return {silo: fingerprint(line_of(silo).encode()) for silo in SILOS}


def experiment(*overrides: str) -> str:
    """The text of an experiment in which both silos take part in every round."""
    return load_config("demo", [*PRIVATE, "participation.rate=1.0", *overrides]).to_toml()


def unsigned_bundle(text: str = "") -> Bundle:
    """What the server asks."""
    took = {str(n): {silo: digest_of(f"{silo}{n}") for silo in SILOS} for n in range(1, ROUNDS + 1)}
    return Bundle(
        charter=CHARTER, experiment=text or experiment(), run="run-1", asked=ASKED, participants=took, keys={}
    )


def words_of(bundle: Bundle, silo: str, event: Event | None = None) -> dict[str, Any]:
    """What an honest silo answers; None: noise 2.0 in a step of every round."""
    event = event or Gaussian(2.0, 10 / UNITS, 5)
    delta, charges = default_delta(UNITS), []
    for number in range(1, ROUNDS + 1):
        charges.append(ChargedRelease(number, "update", 0, to_mapping(event), digest_of(f"paid {silo}{number}")))
    spent = Budget(math.inf, delta).spent([event] * ROUNDS)
    left = [
        {"round": int(n), "silo": silo, "bytes": 8, "blocks": {}, "payloads": {"records": {}}, "sha256": came[silo]}
        for n, came in bundle.participants.items()
    ]
    return {
        **bundle.terms,
        "silo": silo,
        "mechanism": "dp-sgd",
        "unit": "record",
        "units": UNITS,
        "epsilon": spent if math.isfinite(spent) else None,
        "delta": delta,
        "accountant": "pld",
        "granted": {"epsilon": 8.0, "delta": delta},
        "charges": [vars(charge) for charge in charges],
        "left": left,
        "version": "1.0",
        "founded": FOUNDED,
        "date": DATE,
    }


def statement_of(bundle: Bundle, silo: str, change: Change = lambda _: None, event: Event | None = None) -> Statement:
    """One silo's signed answer, after a change of its words."""
    words = words_of(bundle, silo, event)
    change(words)
    return signed_statement(words, key_of(silo))


def sample_bundle(changes: Mapping[str, Change] | None = None, event: Event | None = None, text: str = "") -> Bundle:
    """A bundle of both silos' statements, each signed after its change; without changes it verifies at ``NOW``."""
    bundle = unsigned_bundle(text)
    asked = bundle
    for silo in SILOS:
        change = (changes or {}).get(silo, lambda _: None)
        bundle = bundle.having(statement_of(asked, silo, change, event), line_of(silo))
    return bundle
