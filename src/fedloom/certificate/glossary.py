"""The words that a certificate may use, each explained to somebody who has never met it."""

from __future__ import annotations

import re
from collections.abc import Iterable

EXPLAINED = {
    "differential privacy": "a mathematical promise: results come out nearly alike whether or not one particular record "
    "is in the data, because random noise is added",
    "DP": "differential privacy",
    "epsilon": "how far results may change what somebody believes about one record; 0 is not at all, and smaller is "
    "safer",
    "delta": "the chance that the bound which epsilon sets does not hold",
    "noise": "random numbers that are added so that nobody can tell what one record contributed",
    "silo": "an organisation whose records stay on its own machine",
    "server": "the machine that puts together what silos send; it never sees records",
    "record": "one entry of the data, such as one picture or one row of a table",
    "round": "one exchange between the silos and the server",
    "method": "the procedure by which the generators learned",
    "generator": "a program that learned from records and makes artificial ones",
    "simulation": "one machine that plays all silos and the server",
    "ledger": "a list of everything that was spent of a privacy budget, written before it is spent",
    "statement": "what a silo declares to have spent on its data, with a signature that nobody else can make",
    "fingerprint": "a short form of a silo's public key; ask the silo itself whether it is the right one",
    "canary": "an artificial or held-back record that is put among the others to see whether an attack finds it",
    "checksum": "a number computed from a file, by the rule SHA-256, which changes with every change of the file",
    "card": "the page of explanations that is handed on together with results",
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
