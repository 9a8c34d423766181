"""What the silos of a deployment have signed, beside the run whose folder it lies in."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fedloom.config import Config
from fedloom.errors import FedloomError
from fedloom.privacy.accounting import Budget
from fedloom.privacy.accounts import Account, ReleaseAccount
from fedloom.privacy.statement_body import StatementBody
from fedloom.privacy.statements import Bundle, read_bundle, verify
from fedloom.runs.folder import RunFolder
from fedloom.settings import parse


@dataclass(frozen=True)
class SignedRun:
    """A run, and the bundle of statements in its folder."""

    folder: RunFolder
    bundle: Bundle

    @classmethod
    def read(cls, folder: RunFolder) -> SignedRun:
        """Read the bundle; whether it holds, and for this run, say its ``problems``."""
        return cls(folder, read_bundle(folder.statements))

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Why the statements are no guarantee for everybody in this run's data; empty where they are."""
        return tuple(self._problems())

    def _problems(self) -> Iterator[str]:
        for finding in verify(self.bundle):
            yield f"silo '{finding.silo}': {finding.sentence}" if finding.silo else finding.sentence
        try:
            stated = parse(Config, tomllib.loads(self.bundle.experiment))
        except (FedloomError, ValueError):
            return  # which is found above
        if stated.digest() != self.folder.config.digest():
            yield "the statements are about another experiment"
        if stated.privacy.trust != "local":
            yield f"privacy.trust = '{stated.privacy.trust}', and silos sign for noise of their own alone"
        for row in self.folder.egress():
            if self.bundle.participants.get(str(row["round"]), {}).get(row["silo"]) != row["sha256"]:
                yield f"nobody has signed for what silo '{row['silo']}' sent in round {row['round']}"

    @property
    def accounts(self) -> tuple[Account, ...]:
        """What every silo has spent in this run, from its statement."""
        return tuple(_account(statement.body) for statement in self.bundle.statements)


def _account(body: StatementBody) -> Account:
    if body.accountant == "filter":
        budget = Budget(body.granted.epsilon, body.granted.delta, "filter", body.unit)
    else:
        budget = Budget(math.inf, body.delta, "pld", body.unit)
    releases: dict[str, list[int]] = {}
    for number, charge in enumerate(body.charges):
        releases.setdefault(charge.release, []).append(number)
    events = body.events
    found = [
        ReleaseAccount(name, len(numbers), budget.spent([events[number] for number in numbers]))
        for name, numbers in releases.items()
    ]
    return Account(body.silo, "", budget, tuple(events), tuple(found))
