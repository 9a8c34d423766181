"""What has been spent on a silo's data, for good: an SQLite file of events, written before anything is released.

A charge is durable before the work that it pays for begins, and nothing is ever taken back, so after any crash the
ledger holds at least what was released. No decision depends on a clock. What it cannot know by itself is that somebody
put an older copy of the file in its place: in a deployment the registry does (:mod:`fedloom.privacy.registry`), in a
simulation, which keeps a ledger for each run in its folder, the run's own files (:mod:`fedloom.runs.ledgers`).
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import ClassVar

from fedloom.errors import FedloomError, RunFolderError
from fedloom.privacy.accounting import Budget, Event, event_of, to_mapping
from fedloom.privacy.accounts import Account, Chain, ChargedRelease, LedgerRow, ReleaseAccount
from fedloom.privacy.database import Database

# Releases that are no payloads: all noisy steps of a round, and those before the first.
UPDATE, PRETRAINING = "update", "pretraining"
BEFORE = 0  # the round of what is released before the first

_FOR_GOOD = "BEGIN SELECT RAISE(ABORT, 'for good'); END"
# Which of all ledgers it is, wherever it lies; a copy is the same one.
_IDENTITY = (
    "CREATE TABLE identity (ledger TEXT NOT NULL)",
    "INSERT INTO identity VALUES (lower(hex(randomblob(16))))",
    *(f"CREATE TRIGGER identity_{change} BEFORE {change} ON identity {_FOR_GOOD}" for change in ("UPDATE", "DELETE")),
)
_TABLES = (
    "CREATE TABLE silos (silo TEXT PRIMARY KEY, data TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL,"
    " accountant TEXT NOT NULL, unit TEXT NOT NULL)",
    "CREATE TABLE charges (number INTEGER PRIMARY KEY, run TEXT NOT NULL, silo TEXT NOT NULL REFERENCES silos,"
    " round INTEGER NOT NULL, release TEXT NOT NULL, attempt INTEGER NOT NULL, event TEXT NOT NULL, content TEXT,"
    " UNIQUE (run, silo, round, release, attempt))",
    "CREATE TABLE finished (charge INTEGER PRIMARY KEY REFERENCES charges, sha256 TEXT NOT NULL)",
    *(
        f"CREATE TRIGGER {table}_{change} BEFORE {change} ON {table} {_FOR_GOOD}"
        for table in ("silos", "charges", "finished")
        for change in ("UPDATE", "DELETE")
    ),
    *_IDENTITY,
)


def format_epsilon(epsilon: float) -> str:
    """An epsilon in digits, rounded up: what is printed was never exceeded by what was spent.

    >>> format_epsilon(9.95543)
    '9.956'
    """
    thousandths = 1000 * epsilon
    return f"{math.ceil(thousandths) / 1000:.10g}" if math.isfinite(thousandths) else "inf"


class BudgetSpentError(FedloomError):
    """The next release would pass a silo's budget: the silo sits out."""


class GrantError(FedloomError):
    """Other data, or another budget, than those that a ledger was begun with."""


@dataclass(frozen=True)
class Charge:
    """A release that has been paid for; ``new`` is false where it is one that was paid for before."""

    number: int
    new: bool


class Ledger(Database):
    """The ledger at a path."""

    KIND, APPLICATION, SCHEMA, TABLES = "ledger", 0x666C6564, 3, _TABLES  # "fled"
    # Schema 1 did not note what a silo's charges protect, and schema 2 not which ledger it is.
    MIGRATIONS: ClassVar[Mapping[int, tuple[str, ...]]] = {
        1: ("ALTER TABLE silos ADD COLUMN unit TEXT NOT NULL DEFAULT 'unknown'", *_IDENTITY),
        2: _IDENTITY,
    }

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._tightened: dict[str, Budget] = {}
        self._witnesses: list[Callable[[], None]] = []
        super().__init__(path, read_only=read_only)
        self._unit = "unit" if self._schema > 1 else "'unknown'"  # where it stands which unit charges protect

    @property
    def identity(self) -> str:
        """Which ledger it is; empty for one of an older version that is only read."""
        return str(self._value("SELECT ledger FROM identity")) if self._schema > 2 else ""

    def chain(self) -> Chain:
        """All charges as they are now."""
        heads = [_sha256(self.identity.encode())]
        for row in self._rows("SELECT * FROM charges ORDER BY number"):
            heads.append(_sha256(json.dumps([heads[-1], *row]).encode()))
        return Chain(self.identity, tuple(heads))

    def watch(self, witness: Callable[[], None]) -> None:
        """Have somebody told, too, of every charge when it is durable, and before what it pays for is made."""
        self._witnesses.append(witness)

    def enrol(self, silo: str, data: str, budget: Budget) -> None:
        """Bind a silo's name to its data (by digest) and budget; afterwards neither can change."""
        with self._explained(), self._transaction():
            known = self._account_of(silo)
            if known is None:
                values = (silo, data, budget.epsilon, budget.delta, budget.accountant, budget.unit)
                self._connection.execute("INSERT INTO silos VALUES (?, ?, ?, ?, ?, ?)", values)
                return
        if known[0] != data:
            raise GrantError(
                f"{self.path} keeps account of other data than those of silo '{silo}': a budget belongs to its data"
            )
        if known[1].unit == "unknown":
            raise GrantError(
                f"{self.path} was begun by an older version, which did not note whether it keeps account of records or "
                f"of subjects of silo '{silo}': it can be read, and nothing more be charged to it"
            )
        if known[1].unit != budget.unit:
            raise GrantError(
                f"{self.path} keeps account of each {known[1].unit} of silo '{silo}', but privacy.unit = "
                f"'{budget.unit}' is asked for: the costs of the two do not add up"
            )
        if known[1] != budget:
            raise GrantError(
                f"{self.path} grants silo '{silo}' epsilon {known[1].epsilon:g} at delta {known[1].delta:g} by "
                f"{known[1].accountant}, but epsilon {budget.epsilon:g} at delta {budget.delta:g} by "
                f"{budget.accountant} is asked for"
            )

    def data_of(self, silo: str) -> str | None:
        """The digest of the data that a silo's name is bound to, if it is."""
        known = self._account_of(silo)
        return known[0] if known else None

    def rebind(self, silo: str, old: str, new: str) -> None:
        """Write another digest of the same data where the ``old`` one stands, which leaves the file."""
        with self._explained(), self._transaction():
            self._connection.execute("DROP TRIGGER silos_UPDATE")
            self._connection.execute("UPDATE silos SET data = ? WHERE silo = ? AND data = ?", (new, silo, old))
            self._connection.execute(f"CREATE TRIGGER silos_UPDATE BEFORE UPDATE ON silos {_FOR_GOOD}")

    def tighten(self, silo: str, budget: Budget) -> None:
        """Hold a silo, as long as this ledger is open, to a smaller budget beside the one that it was granted."""
        self._tightened[silo] = budget

    def budget_of(self, silo: str) -> Budget | None:
        """What was granted, if anything was."""
        known = self._account_of(silo)
        return known[1] if known else None

    def charge(self, run: str, silo: str, round: int, release: str, event: Event, *, content: str | None) -> Charge:
        """Pay for a single release."""
        return self.charge_all(run, silo, round, {release: event}, content=content)[release]

    def charge_all(
        self, run: str, silo: str, round: int, releases: Mapping[str, Event], *, content: str | None
    ) -> dict[str, Charge]:
        """Pay for all releases of a round, durably, before they are made; refuse them all if one passes the budget.

        ``content`` is a digest of all that determines them where their noise can be repeated: the same content is the
        same release and costs nothing more. Without it (secure noise) every attempt is a release of its own.
        """
        with self._explained(), self._transaction():
            known = self._account_of(silo)
            if known is None:
                raise FedloomError(f"{self.path} has no account for silo '{silo}'")
            charges = {}
            for release, event in releases.items():
                key = (run, silo, round, release)
                before = self._known(key, event, content)
                if isinstance(before, Charge):
                    charges[release] = before
                    continue
                for budget in (known[1], self._tightened.get(silo, known[1])):
                    self._check(budget, silo, round, release, event)
                cursor = self._connection.execute(
                    "INSERT INTO charges (run, silo, round, release, attempt, event, content)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (*key, before, _written(event), content),
                )
                assert cursor.lastrowid is not None
                charges[release] = Charge(cursor.lastrowid, new=True)
        for witness in self._witnesses:
            witness()
        return charges

    def require(self, silo: str, releases: Mapping[str, Event]) -> None:
        """Refuse now what could not be paid later: others may have paid by then."""
        known = self._account_of(silo)
        for budget in (self._tightened.get(silo), known and known[1]):
            if budget and not budget.allows([*self.events(silo), *releases.values()]):
                raise BudgetSpentError(f"silo '{silo}' sits out: it could not pay for {', '.join(releases)}")

    def _known(self, key: tuple[str, str, int, str], event: Event, content: str | None) -> Charge | int:
        """The charge for this very release, else how many attempts there were."""
        before = self._rows(
            "SELECT number, event, content FROM charges WHERE run = ? AND silo = ? AND round = ? AND release = ?", *key
        )
        if content is None or not before:
            return len(before)
        for number, old_event, old_content in before:
            if (old_event, old_content) == (_written(event), content):
                return Charge(number, new=False)
        return len(before)  # other content has noise of its own: another release

    def released(
        self,
        run: str,
        silo: str,
        round: int,
        releases: Mapping[str, Event],
        *,
        content: str | None,
        stored: bytes | None,
        make: Callable[[], bytes],
        store: Callable[[bytes], None],
    ) -> bytes:
        """What a silo of a deployment sends for a round: what it finished before, byte for byte, else something new.

        Only what is new is paid for, before ``make`` is called, and it is noted here before it is stored: a crash
        leaves either bytes that may be sent again or a charge for nothing.
        """
        if stored is not None and self._is_finished(run, silo, round, releases, _sha256(stored)):
            return stored
        charges = self.charge_all(run, silo, round, releases, content=content)
        made = make()
        for charge in charges.values():
            self.finish(charge, _sha256(made))
        store(made)
        return made

    def _is_finished(self, run: str, silo: str, round: int, releases: Iterable[str], sha256: str) -> bool:
        return all(self.may_resend(run, silo, round, release, sha256) for release in releases)

    def finish(self, charge: Charge, sha256: str) -> None:
        """Note the bytes of a finished release, so that exactly these may be sent again."""
        with self._explained(), self._transaction():
            old = self._rows("SELECT sha256 FROM finished WHERE charge = ?", charge.number)
            if not old:
                self._connection.execute("INSERT INTO finished VALUES (?, ?)", (charge.number, sha256))
            elif old[0][0] != sha256:
                raise FedloomError(f"charge {charge.number} of {self.path} already paid for other bytes")

    def may_resend(self, run: str, silo: str, round: int, release: str, sha256: str) -> bool:
        """Whether these very bytes are a finished release that was paid for."""
        return bool(
            self._value(
                "SELECT count(*) FROM charges JOIN finished ON charge = number"
                " WHERE run = ? AND silo = ? AND round = ? AND release = ? AND sha256 = ?",
                *(run, silo, round, release, sha256),
            )
        )

    def events(self, silo: str, release: str | None = None) -> list[Event]:
        """Everything charged to a silo's data, over all runs, in order."""
        rows = self._rows("SELECT event, release FROM charges WHERE silo = ? ORDER BY number", silo)
        return [event_of(json.loads(event)) for event, name in rows if release in (None, name)]

    def charges(self, run: str, silo: str) -> list[ChargedRelease]:
        """What one run was charged for a silo's data, in order."""
        rows = self._rows(
            "SELECT round, release, attempt, event, coalesce(sha256, '') FROM charges LEFT JOIN finished"
            " ON charge = number WHERE run = ? AND silo = ? ORDER BY number",
            *(run, silo),
        )
        return [ChargedRelease(number, name, tried, json.loads(event), sha) for number, name, tried, event, sha in rows]

    def rows_after(self, charge: int) -> list[LedgerRow]:
        """The charges after one of this number, as they stand in the file."""
        return [LedgerRow(*row) for row in self._rows("SELECT * FROM charges WHERE number > ? ORDER BY number", charge)]

    def take_over(self, row: LedgerRow) -> None:
        """Write a charge that a lost, newer copy of this ledger held; it was paid, whatever the budget says."""
        with self._explained(), self._transaction():
            self._connection.execute("INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?)", astuple(row))

    def paid(self) -> set[tuple[int, str]]:
        """The rounds that were charged for, with the silos; pretraining alone is not what a round sends."""
        return set(self._rows("SELECT DISTINCT round, silo FROM charges WHERE release <> ?", PRETRAINING))

    def _repr_html_(self) -> str:
        """Every account, in a notebook."""
        from fedloom.privacy.outlook import shown_accounts  # which is about this class

        return shown_accounts(self.accounts())._repr_html_()

    def accounts(self) -> list[Account]:
        """The account of every silo of the ledger, by name."""
        found = []
        for (silo,) in self._rows("SELECT silo FROM silos ORDER BY silo"):
            known = self._account_of(silo)
            assert known is not None
            data, budget = known
            counts = self._rows("SELECT release, count(*) FROM charges WHERE silo = ? GROUP BY release", silo)
            releases = [ReleaseAccount(name, n, budget.spent(self.events(silo, name))) for name, n in counts]
            found.append(Account(silo, data, budget, tuple(self.events(silo)), tuple(releases)))
        return found

    def _check(self, budget: Budget, silo: str, round: int, release: str, event: Event) -> None:
        before = self.events(silo)
        if budget.allows([*before, event]):
            return
        cost = budget.spent([*before, event])
        if not before:
            raise BudgetSpentError(
                f"silo '{silo}' sits out: its budget of epsilon {budget.epsilon:g} (delta {budget.delta:g}) is smaller "
                f"than the cost of one round, {cost:.3g}"
            )
        raise BudgetSpentError(
            f"silo '{silo}' sits out round {round}: release '{release}' would raise its epsilon from "
            f"{budget.spent(before):.4g} to {cost:.4g}, beyond {budget.epsilon:g} (delta {budget.delta:g})"
        )

    def _account_of(self, silo: str) -> tuple[str, Budget] | None:
        rows = self._rows(f"SELECT data, epsilon, delta, accountant, {self._unit} FROM silos WHERE silo = ?", silo)
        return (rows[0][0], Budget(*rows[0][1:])) if rows else None

    def _complaint(self, error: sqlite3.DatabaseError) -> str:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_ROLLBACK:
            return f"the last charge to the ledger {self.path} was cut off; going on with the run ends it"
        return super()._complaint(error)


def _written(event: Event) -> str:
    return json.dumps(to_mapping(event), sort_keys=True)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_accounts(path: Path) -> list[Account]:
    """What ``fedloom ledger PATH`` shows."""
    if not path.is_file():
        raise RunFolderError(f"there is no ledger at {path}")
    ledger = Ledger(path, read_only=True)
    try:
        return ledger.accounts()
    finally:
        ledger.close()
