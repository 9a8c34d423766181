"""What may be said of a run's privacy: in words from its settings, in numbers from its ledger alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.config import PrivacyConfig
from fedloom.privacy.accounting import NoGuarantee
from fedloom.privacy.accounts import Account
from fedloom.privacy.ledger import PRETRAINING, UPDATE, Ledger, format_epsilon
from fedloom.privacy.trust import Distributed, Local

NONE = "no DP guarantee"
NOT_COVERED = (
    "training losses, metrics against records, and the choice of settings after earlier runs: this simulation shows "
    "them, a deployment keeps them at the silo"
)


@dataclass(frozen=True)
class PrivacySummary:
    """The guarantee in one sentence, its parts by name, and every silo's account."""

    guarantee: str
    parts: Mapping[str, str]
    accounts: tuple[Account, ...]

    @property
    def epsilon(self) -> float | None:
        """Of the silo that has spent most; None where no epsilon holds."""
        return _largest(account.spent for account in self.accounts)

    @property
    def replaced(self) -> float | None:
        """The same for one record (or subject) replaced by another."""
        return _largest(account.replaced for account in self.accounts)

    @property
    def delta(self) -> float | None:
        """The largest of the silos'; None where nothing was spent."""
        return max((account.budget.delta for account in self.accounts), default=None)

    @property
    def line(self) -> str:
        """The one line with which every command says what holds."""
        return f"privacy: {self.guarantee}"

    def in_short(self) -> dict[str, Any]:
        """The key ``privacy`` of every command's ``--json``."""
        return {"guarantee": self.guarantee, "epsilon": self.epsilon, "delta": self.delta}

    def to_mapping(self) -> dict[str, Any]:
        """What reports, cards and ``--json`` show, as plain JSON values."""
        return {
            "guarantee": self.guarantee,
            "epsilon": self.epsilon,
            "epsilon_replaced": self.replaced,
            "delta": self.delta,
            **{name.replace(" ", "_"): text for name, text in self.parts.items()},
            # Reports are handed on, and whoever guesses records could tell from their digest that he is right.
            "silos": [{k: v for k, v in account.to_mapping().items() if k != "data"} for account in self.accounts],
        }


def summarise(settings: PrivacyConfig, ledger: Path) -> PrivacySummary:
    """What a run's settings and the ledger in its folder say; before the first round there is no ledger."""
    return summary_of(settings, *(_read(ledger) if ledger.is_file() else ((), "")))


def summary_of(settings: PrivacyConfig, accounts: tuple[Account, ...], problem: str = "") -> PrivacySummary:
    """What settings and silos' accounts say; ``problem``: why no epsilon holds, if so."""
    if settings.mechanism == "none":
        return PrivacySummary(NONE, {"mechanism": "none"}, ())
    unit = settings.unit
    several = "; somebody with records at several silos composes over all of them" if unit == "subject" else ""
    replaced = _largest(account.replaced for account in accounts)
    parts = (
        {"replacement": f"for one {unit} replaced by another: at most epsilon {format_epsilon(replaced)}"}
        if replaced
        else {}
    )
    parts |= {
        "mechanism": _mechanism(settings, {release.name for account in accounts for release in account.releases}),
        "unit": unit,
        "adjacency": f"one {unit} of a silo added or removed; the number of {unit}s, in all and in each of the silo's "
        f"groups, is declared public{several}",
        "trust": f"{settings.trust}: {_trust(settings, len(accounts))}",
        "accountant": settings.accountant,
        "not covered": NOT_COVERED,
    }
    spent = max((account.spent for account in accounts), default=0.0)
    delta = max((account.budget.delta for account in accounts), default=settings.delta)
    pair = f"({format_epsilon(spent)}, {delta:g})"
    guarantee = f"{pair}-differential privacy for each {unit}, by what every silo has spent so far"
    if settings.trust != "local":  # no guarantee against whoever sees what a single silo sends
        guarantee += f"; {_trust(settings, len(accounts))}"
    if problem:
        guarantee = f"{NONE}: {problem}"
    elif not spent:
        guarantee = "differential privacy is planned, and nothing has been spent yet"
    return PrivacySummary(guarantee, parts, accounts)


def _largest(epsilons: Iterable[float]) -> float | None:
    """None where there is none, or an infinite one."""
    largest = max(epsilons, default=math.inf)
    return largest if math.isfinite(largest) else None


def _mechanism(settings: PrivacyConfig, charged: Set[str]) -> str:
    """What made noise: steps of training, payloads, or both."""
    payloads = sorted(charged - {UPDATE, PRETRAINING})
    sums = f"noisy sums of bounded contributions ({', '.join(payloads)})" if payloads else ""
    if sums and UPDATE not in charged:
        return sums
    bound = f"{settings.clipping} clip bound" + (f" {settings.clip:g}" if settings.clipping == "fixed" else "")
    return f"dp-sgd, {bound}" + (f"; {sums}" if sums else "")


def _trust(settings: PrivacyConfig, silos: int) -> str:
    """Whom one must trust; how many silos share the noise is known once they are enrolled."""
    if settings.trust == "local":
        return Local().sentence
    return Distributed(silos, settings.tolerated).sentence if silos else "silos will share the noise"


def _read(path: Path) -> tuple[tuple[Account, ...], str]:
    """The accounts, and why no epsilon holds, if so."""
    ledger = Ledger(path, read_only=True)
    try:
        accounts = tuple(ledger.accounts())
        events = (event for account in accounts for event in account.events)
        return accounts, next((event.reason for event in events if isinstance(event, NoGuarantee)), "")
    finally:
        ledger.close()
