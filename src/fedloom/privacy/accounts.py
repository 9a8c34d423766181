"""What a ledger says: the account of each silo's data, and the chain of all charges."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedloom.privacy.accounting import Budget, Event


@dataclass(frozen=True)
class ChargedRelease:
    """A release of one run, as the ledger has it."""

    round: int
    release: str
    attempt: int  # 0 the first time; noise that cannot be repeated makes every further one a release of its own
    event: dict[str, Any]
    sha256: str = ""  # of the bytes that it paid for; empty where none were finished


@dataclass(frozen=True)
class LedgerRow:
    """A charge as it stands in the file, so that a lost one can be written again, byte for byte."""

    charge: int  # the first is 1
    run: str
    silo: str
    round: int
    release: str
    attempt: int
    event: str  # JSON
    content: str | None


@dataclass(frozen=True)
class ReleaseAccount:
    """All charges for one kind of release."""

    name: str
    charges: int
    spent: float  # what they cost by themselves; together with others they cost less than the sum


@dataclass(frozen=True)
class Account:
    """One silo's data: what may be spent and what has been."""

    silo: str
    data: str
    budget: Budget
    events: tuple[Event, ...]
    releases: tuple[ReleaseAccount, ...]

    @cached_property
    def spent(self) -> float:
        """For one record (or subject) more or less: what the budget is held to."""
        return self.budget.spent(self.events)

    @cached_property
    def replaced(self) -> float:
        """What the same events cost for one record (or subject) replaced by another."""
        return self.budget.spent(self.events, "replaced")

    @property
    def left(self) -> float:
        """The epsilon that the budget still allows, never below 0."""
        return max(0.0, self.budget.epsilon - self.spent)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values; what is infinite is null, as JSON has no such number."""

        def finite(value: float) -> float | None:
            return value if value < float("inf") else None

        return {
            "silo": self.silo,
            "data": self.data,
            "epsilon": finite(self.budget.epsilon),
            "delta": self.budget.delta,
            "accountant": self.budget.accountant,
            "unit": self.budget.unit,
            "spent": finite(self.spent),
            "replaced": finite(self.replaced),
            "left": finite(self.left),
            "releases": [{"name": r.name, "charges": r.charges, "spent": finite(r.spent)} for r in self.releases],
        }


@dataclass(frozen=True)
class Chain:
    """A ledger's charges as a chain: each head is over all charges up to one, so that none can be missing unseen."""

    ledger: str  # its identity
    heads: tuple[str, ...]  # before the first charge, after the first, and so on

    @property
    def charges(self) -> int:
        """How many charges have been made."""
        return len(self.heads) - 1

    def goes_on_from(self, charges: int, head: str) -> bool:
        """Whether it had this head after so many charges."""
        return charges <= self.charges and self.heads[charges] == head
