"""Secure sums in one process: parties, a collector, and silos that leave at a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.secure.collector import Collector
from fedloom.secure.party import Party
from fedloom.secure.terms import Parts, Terms, Turn
from fedloom.secure.words import Integers, Ring

ORDER = list(Turn)


@cache
def key_of(silo: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def genuine(silo: str, words: bytes, signature: bytes) -> bool:
    try:
        key_of(silo).public_key().verify(signature, words)
    except InvalidSignature:
        return False
    return True


def terms_of(silos: int, threshold: int, size: int = 8, bits: int = 32, session: str = "run/1") -> Terms:
    return Terms(session, tuple(f"s{number:03d}" for number in range(silos)), threshold, Ring(size, bits))


def parties_of(terms: Terms) -> dict[str, Party]:
    return {silo: Party(terms, silo, key_of(silo).sign, genuine) for silo in terms.silos}


def answer(party: Party, stage: Turn, question: Parts, values: Integers) -> Parts:
    return {
        Turn.KEYS: lambda: party.keys(),
        Turn.SHARES: lambda: party.shares(question),
        Turn.MASKED: lambda: party.masked(question, values),
        Turn.CONSENT: lambda: party.consent(question),
        Turn.REVEAL: lambda: party.reveal(question),
    }[stage]()


@dataclass
class Round:
    """One sum, carried out."""

    terms: Terms
    values: Mapping[str, Integers]
    leaves: Mapping[str, Turn] = field(default_factory=dict)  # at which stage a silo no longer answers
    touched: Callable[[Turn, str, Parts], Parts] = lambda stage, silo, parts: parts  # what a silo is asked
    sent: dict[tuple[Turn, str], Parts] = field(default_factory=dict)

    def carried_out(self) -> Collector:
        parties, collector = parties_of(self.terms), Collector(self.terms, genuine)
        for stage in Turn:
            for silo in collector.awaited:
                if silo in self.leaves and ORDER.index(self.leaves[silo]) <= ORDER.index(stage):
                    continue
                question = self.touched(stage, silo, dict(collector.question(silo)))
                self.sent[stage, silo] = answer(parties[silo], stage, question, self.values[silo])
                collector.take(silo, self.sent[stage, silo])
            collector.advance()
        return collector


def random_values(terms: Terms, seed: int = 0) -> dict[str, Integers]:
    numbers, most = np.random.default_rng(seed), 2 ** (terms.ring.bits - 1) // len(terms.silos)
    return {silo: numbers.integers(-most + 1, most, terms.ring.size) for silo in terms.silos}
