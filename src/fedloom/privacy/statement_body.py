"""What a silo states of a run: the charges of its ledger, what they cost together, and what left."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from fedloom.config import Config
from fedloom.privacy.accounting import Budget, Event, event_of
from fedloom.privacy.accounts import ChargedRelease
from fedloom.privacy.ledger import BEFORE, UPDATE


def written_time(time: datetime) -> str:
    """A time as statements have it: whole seconds, in UTC."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_of(text: str) -> datetime:
    """Read back what :func:`written_time` gave; anything else is refused."""
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


@dataclass(frozen=True)
class GrantedBudget:
    """What the silo's operator grants to all runs together."""

    epsilon: float = math.inf  # spending is only counted
    delta: float = 0.0  # 0: nothing was granted, and nothing charged


@dataclass(frozen=True, kw_only=True)
class StatementBody:
    """What a silo states; a key that is null in the file stands for what is infinite."""

    silo: str
    charter: str  # digests
    experiment: str
    run: str
    asked: str
    participants: dict[str, dict[str, str]]  # as the server says it
    mechanism: Literal["none", "dp-sgd"]
    unit: Literal["record", "subject"]
    units: int  # how many of them the silo holds
    epsilon: float = math.inf  # of this run's charges alone; infinite: there is no guarantee
    delta: float = 0.0
    accountant: Literal["pld", "filter", "none"] = "none"
    granted: GrantedBudget = field(default_factory=GrantedBudget)
    charges: tuple[ChargedRelease, ...] = ()
    left: tuple[dict[str, Any], ...] = ()  # rows as those of egress.jsonl
    version: str = ""  # of fedloom
    # The three that are added where the key is.
    key: str = ""  # fingerprint
    founded: str = ""  # when the federation's authority began
    date: str = ""

    def to_mapping(self) -> dict[str, Any]:
        """Plain values; what is infinite is null, as JSON has no such number."""
        granted = {"epsilon": _finite(self.granted.epsilon), "delta": self.granted.delta}
        return {**asdict(self), "epsilon": _finite(self.epsilon), "granted": granted}

    @property
    def events(self) -> list[Event]:
        """What was charged."""
        return [event_of(charge.event) for charge in self.charges]

    @property
    def counted(self) -> float:
        """What the charges cost together; infinite where nothing bounds it."""
        if self.accountant == "pld":
            return Budget(math.inf, self.delta, "pld", self.unit).spent(self.events)
        if self.accountant == "none" or math.isinf(self.granted.epsilon):
            return math.inf
        return Budget(self.granted.epsilon, self.granted.delta, "filter", self.unit).spent(self.events)


def drawn_rounds(config: Config, silos: Sequence[str]) -> dict[str, list[int]]:
    """For which rounds each silo is drawn, in public, before a run."""
    from fedloom.federation.participation import participants  # whoever only signs needs no torch
    from fedloom.streams import Streams

    before = [BEFORE] * (config.data.groups == "discover")  # all of them
    drawn: dict[str, list[int]] = {silo: [*before] for silo in silos}
    for number in range(1, config.rounds + 1):
        for index in participants(config.participation, len(silos), number, Streams(config.seed)):
            drawn[silos[index]].append(number)
    return drawn


def accountant_for(charges: Collection[ChargedRelease], drawn: Collection[int]) -> Literal["pld", "filter"]:
    """By whom a run's charges may be counted: tightly where nobody could choose any of them, looking at others.

    That is so if all was as planned before the run: one attempt at each round for which the silo was drawn.
    """
    trained = {charge.round for charge in charges if charge.release == UPDATE}
    as_planned = not any(charge.attempt for charge in charges) and trained in (set(), {*drawn} - {BEFORE})
    return "pld" if as_planned else "filter"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
