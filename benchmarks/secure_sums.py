"""What a secure sum costs beside a plain one: processor seconds of a silo and of the server, and bytes, for one round.

    python benchmarks/secure_sums.py [--silos 10 100] [--values 7000 1100000 6600000] [--bits 32]

All turns of the protocol in one process, without a wire: what a wire adds depends on the wire, and what silos do at the
same time takes its time once. Each cell is done twice: everybody stays, and a tenth of the silos leaves after their
shares are out, which is the dearest moment. A plain sum is float32 values as they are sent, added up in float64. Every
sum is compared with that of the integers. ``silo_s`` is the mean over silos; ``noise_s`` a silo's discrete noise, once.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common import keep, show
from fedloom.privacy.discrete_gaussian import discrete_gaussian
from fedloom.privacy.noise import NoiseKey, SecureNoise
from fedloom.secure.collector import Collector
from fedloom.secure.party import Party
from fedloom.secure.terms import Parts, Terms, Turn
from fedloom.secure.words import Ring

Found = TypeVar("Found")


class Clock:
    """Processor seconds by who spends them."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def of(self, who: str, work: Callable[[], Found]) -> Found:
        start = time.process_time()
        found = work()
        self.spent[who] += time.process_time() - start
        return found


def plain(silos: int, values: int) -> dict[str, float]:
    """The same sum in clear."""
    clock, numbers = Clock(), np.random.default_rng(0).standard_normal(values).astype(np.float32)
    total = np.zeros(values)
    for _ in range(silos):
        sent = clock.of("silo", numbers.tobytes)
        total += clock.of("server", lambda data=sent: np.frombuffer(data, np.float32).astype(np.float64))
    return {"silo_s": clock.spent["silo"] / silos, "server_s": clock.spent["server"], "up": 4 * values}


def secure(silos: int, values: int, bits: int, leaving: int) -> dict[str, Any]:
    """All turns; ``leaving`` silos answer nothing after their shares are out."""
    names = tuple(f"s{number:03d}" for number in range(silos))
    keys = {name: Ed25519PrivateKey.generate() for name in names}

    def genuine(silo: str, words: bytes, signature: bytes) -> bool:
        try:
            keys[silo].public_key().verify(signature, words)
        except InvalidSignature:
            return False
        return True

    terms = Terms("benchmark", names, silos - (silos - 1) // 3, Ring(values, bits))
    parties = {name: Party(terms, name, keys[name].sign, genuine) for name in names}
    collector, clock = Collector(terms, genuine), Clock()
    numbers = np.random.default_rng(0).integers(-1000, 1000, values)
    up: dict[str, int] = defaultdict(int)
    down: dict[str, int] = defaultdict(int)

    def answered(party: Party, turn: Turn, question: Parts) -> Parts:
        turns: dict[Turn, Callable[[], Parts]] = {
            Turn.KEYS: party.keys,
            Turn.SHARES: lambda: party.shares(question),
            Turn.MASKED: lambda: party.masked(question, numbers),
            Turn.CONSENT: lambda: party.consent(question),
            Turn.REVEAL: lambda: party.reveal(question),
        }
        return turns[turn]()

    left = set(names[silos - leaving :]) if leaving else set()
    for turn in Turn:
        for name in collector.awaited:
            if name in left and turn not in (Turn.KEYS, Turn.SHARES):
                continue
            question = collector.question(name)
            sent = clock.of(turn, lambda n=name, q=question, t=turn: answered(parties[n], t, q))
            up[name] += sum(map(len, sent.values()))
            down[name] += sum(map(len, question.values()))
            clock.of("server", lambda n=name, s=sent: collector.take(n, s))
        clock.of("unmask" if turn is Turn.REVEAL else "server", collector.advance)
    assert np.array_equal(collector.total, len(collector.present) * numbers)
    seconds = {turn: clock.spent[turn] / silos for turn in Turn}
    return {
        "silo_s": sum(seconds.values()),
        "masking_s": seconds[Turn.MASKED],
        "server_s": clock.spent["server"] + clock.spent["unmask"],
        "unmasking_s": clock.spent["unmask"],
        "up": up[names[0]],
        "down": down[names[0]],
    }


def noise_seconds(values: int) -> float:
    """Of one silo's discrete noise, from the operating system's generator."""
    start = time.process_time()
    discrete_gaussian(12345.6, values, SecureNoise().words(NoiseKey(0, 1, 0)))
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--values", type=int, nargs="+", default=[7_000, 1_100_000, 6_600_000])
    parser.add_argument("--bits", type=int, default=32)
    asked = parser.parse_args()
    rows = []
    for silos in asked.silos:
        for values in asked.values:
            cell = {"silos": silos, "values": values, "bits": asked.bits}
            rows.append({**cell, "sum": "plain", **plain(silos, values)})
            for leaving in (0, silos // 10):
                found = secure(silos, values, asked.bits, leaving)
                rows.append({**cell, "sum": "secure", "leave": leaving, "noise_s": noise_seconds(values), **found})
            print(*(rounded(row) for row in rows[-3:]), sep="\n", flush=True)
    found = [rounded(row) for row in rows]
    show("a round's sum", [row for row in found if row["sum"] == "plain"])
    show("a round's secure sum", [row for row in found if row["sum"] == "secure"])
    keep("secure_sums-cpu", found)


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in row.items()}


if __name__ == "__main__":
    main()
