"""The words that a certificate may use, each explained to somebody who has never met it."""

from __future__ import annotations

import re
from collections.abc import Iterable

EXPLAINED = {
    "differential privacy": "a mathematical promise that results come out nearly alike whether or not a certain record "
    "is in the data, kept by adding noise",
    "DP": "differential privacy",
    "epsilon": "how much surer results can make anybody about one record: not at all at 0, and less is safer",
    "delta": "the chance that the limit which epsilon sets does not hold",
    "noise": "random numbers that hide what a single record contributed",
    "silo": "an organisation whose records stay on its own machine",
    "server": "the machine that puts together what silos send, and never sees a record",
    "federation": "the silos and their server",
    "record": "one entry of the data, such as a picture or a row of a table",
    "round": "one exchange between silos and server",
    "method": "the procedure of learning",
    "generator": "a program that has learned from records and makes artificial ones",
    "model": "what a generator consists of: numbers that were learned",
    "simulation": "one machine that plays all silos and the server",
    "ledger": "the list of all that was spent on a silo's data, written before it was spent",
    "statement": "what a silo declares to have spent on its data, and signs",
    "fingerprint": "a short form of the key by which a silo signs",
    "canary": "a record that is put among the others to see whether an attack finds it",
    "membership": "an attack that asks whether a record was learned from",
    "held-out": "kept aside, not learned from",
    "outlier": "a record unlike the others",
    "confidence": "how often a method of measuring is right",
    "--accept-risk": "what somebody adds to the command that hands results on, and answers for",
    "card": "the page of explanations that goes with results",
    "checksum": "a number, by the rule SHA-256, that any change of a file changes",
}
_PLURALS = {"canary": "canaries"}


def words_used(texts: Iterable[str]) -> dict[str, str]:
    """Those that occur, with what they mean; an explanation may use another word, which then is explained too."""
    everything, found = " ".join(texts), dict[str, str]()
    while True:
        new = {word: told for word, told in EXPLAINED.items() if word not in found and _occurs(word, everything)}
        if not new:
            return {word: told for word, told in EXPLAINED.items() if word in found}
        found |= new
        everything += " " + " ".join(new.values())


def _occurs(word: str, text: str) -> bool:
    forms = "|".join((re.escape(word) + "s?", *([_PLURALS[word]] if word in _PLURALS else [])))
    return re.search(rf"(?<!\w)(?:{forms})(?!\w)", text, 0 if word.isupper() else re.IGNORECASE) is not None
