"""Which ledger keeps account of which records on this machine, so that one that vanishes is missed.

A deployed silo's ledger is a file, and files are deleted, restored from backups and copied; each of these would grant
spent budget anew. So one folder of the user's, outside of silos' folders, remembers of every set of records its ledger:
which it is, where it lies, and how far it has come. It is written after the ledger and before what a charge pays for is
made: after a crash it may lag behind by charges for which nothing was released, and it never leads.

Records are known here, and in those ledgers, by digests under a key that stays in the folder: nobody can tell from a
ledger whether some records that he can guess are in it. Ledgers of simulations, one for each run, are not registered.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedloom.errors import FedloomError, RunFolderError
from fedloom.privacy.accounts import Chain
from fedloom.privacy.database import Database
from fedloom.privacy.ledger import GrantError, Ledger

if TYPE_CHECKING:
    from fedloom.federation.records import Silo

VARIABLE = "FEDLOOM_REGISTRY"
FILE, KEY = "registry.sqlite", "registry.key"
KEYED = "keyed"  # how digests of records begin that a key is needed for
SKETCH = 1024  # hashes that stand for a set of records: the smallest of all
OVERLAP = 0.05  # this part of a set of records in another one makes them the same data
ROWS = 1024  # records hashed at once

Hashes = npt.NDArray[np.uint64]

_TABLES = (
    "CREATE TABLE own (key TEXT NOT NULL)",
    "CREATE TABLE entries (records TEXT PRIMARY KEY, silo TEXT NOT NULL, sketch BLOB NOT NULL, ledger TEXT NOT NULL,"
    " path TEXT NOT NULL, charges INTEGER NOT NULL, head TEXT NOT NULL)",
)


def registry_folder() -> Path:
    """One for each user and machine, unless FEDLOOM_REGISTRY names another folder."""
    named = os.environ.get(VARIABLE)
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return (Path(named) if named else state / "fedloom").resolve()


@dataclass(frozen=True)
class RegisteredLedger:
    """What is known of the ledger of some records."""

    records: str  # keyed digest
    silo: str
    sketch: bytes
    ledger: str  # identity
    path: Path
    charges: int
    head: str  # of the chain over these charges

    @property
    def way_out(self) -> str:
        """What an operator can do who knows better."""
        return f"or give up what it counted: fedloom ledger --forget {shlex.quote(str(self.path))}"


class LedgerRegistry(Database):
    """The registry in a folder, which is made if it is not there, for its owner alone."""

    KIND, APPLICATION, SCHEMA, TABLES = "registry", 0x666C6572, 1, _TABLES  # "fler"

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or registry_folder()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.folder / FILE, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise RunFolderError(f"cannot use the registry's folder {self.folder}: {error.strerror}") from error
        super().__init__(self.folder / FILE)
        with self._explained(), self._transaction():
            self._key = self._own_key()

    @property
    def key(self) -> Path:
        """What all its digests are made with."""
        return self.folder / KEY

    def _own_key(self) -> bytes:
        """Made on first use; never a second time, because nothing would be known by its digest any more."""
        begun = self._rows("SELECT key FROM own")
        try:
            if not begun and not self.key.exists():
                _write_secret(self.key, secrets.token_bytes(32))
            key = self.key.read_bytes()
        except OSError as error:
            raise RunFolderError(f"cannot use the registry's key {self.key}: {error.strerror}") from error
        if not begun:
            self._connection.execute("INSERT INTO own VALUES (?)", (_name_of(key),))
        elif begun[0][0] != _name_of(key):
            raise RunFolderError(f"{self.key} is not the key that the registry {self.path} was begun with; put it back")
        return key

    def digest(self, silo: Silo) -> str:
        """What a silo's records are known by; without the key nobody can make it, or tell what it is of."""
        keyed = hmac.new(self._key, silo.digest.encode(), hashlib.sha256).hexdigest()
        return f"{KEYED}:{_name_of(self._key)}:{keyed}"

    def bind(self, silo: Silo, ledger: Ledger) -> str:
        """The keyed digest of a silo's records, also where a ledger of an older version has a plain one."""
        records, known = self.digest(silo), ledger.data_of(silo.name) or ""
        if known == silo.digest:
            ledger.rebind(silo.name, known, records)
        elif known.startswith(KEYED) and known.split(":")[1] != _name_of(self._key):
            raise GrantError(
                f"{ledger.path} knows its records by the key of another registry than {self.folder}; bring the folder "
                f"of that one along, and let {VARIABLE} name it"
            )
        return records

    def check(self, silo: Silo, path: Path, ledger: Ledger | None) -> None:
        """Refuse a ledger that would count anew what another one has counted; None: there is none at the path yet."""
        self._check(silo, path.resolve(), ledger.chain() if ledger else None)

    def register(self, silo: Silo, ledger: Ledger) -> None:
        """Enter the ledger of a silo's records, and where it lies and how far it has come each time."""
        path = ledger.path.resolve()
        with self._explained(), self._transaction():
            chain = ledger.chain()  # not before, or another process might have come further in between
            known = self._check(silo, path, chain)
            state = (str(path), chain.charges, chain.heads[-1])
            if self.digest(silo) not in {entry.records for entry in known}:
                self._connection.execute(
                    "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (self.digest(silo), silo.name, self._sketch(silo).tobytes(), chain.ledger, *state),
                )
            if any((str(entry.path), entry.charges, entry.head) != state for entry in known):
                self._connection.execute(
                    "UPDATE entries SET path = ?, charges = ?, head = ? WHERE ledger = ?", (*state, chain.ledger)
                )

    def entries(self) -> list[RegisteredLedger]:
        """All of them, by where their ledgers lie."""
        return list(self._found("true ORDER BY path, silo"))

    def at(self, path: Path) -> list[RegisteredLedger]:
        """What is known of the ledger at a path: it must be registered."""
        found = list(self._found("path = ?", str(path.resolve())))
        if not found:
            raise FedloomError(f"no ledger at {path.resolve()} is registered in {self.folder}")
        return found

    def forget(self, path: Path) -> list[RegisteredLedger]:
        """Strike out the ledger at a path: what it counted no longer stands in the way of another one."""
        with self._explained(), self._transaction():
            struck = self.at(path)
            self._connection.execute("DELETE FROM entries WHERE path = ?", (str(path.resolve()),))
        return struck

    def _check(self, silo: Silo, path: Path, chain: Chain | None) -> list[RegisteredLedger]:
        """Why a ledger may not be used; what is known of it and the records if it may."""
        records, identity = self.digest(silo), chain.ledger if chain else ""
        known = list(self._found("records = ? OR ledger = ?", records, identity))
        for entry in known:
            there = entry.path != path and _lies_at(entry.path, entry.ledger)
            if entry.ledger != identity and there:
                raise GrantError(
                    f"{path} would be a second ledger of the records of silo '{silo.name}', which {entry.path} keeps "
                    f"account of: use that one, {entry.way_out}"
                )
            if chain is None or entry.ledger != identity:
                raise GrantError(
                    f"the ledger of the records of silo '{silo.name}' is gone from {entry.path}, and a new one at "
                    f"{path} would begin their budget anew: put it back, {entry.way_out}"
                )
            if there:
                raise GrantError(
                    f"{path} is a copy of {entry.path}, which is still there, and each would spend the whole budget: "
                    f"use {entry.path}, or move it away"
                )
            if not chain.goes_on_from(entry.charges, entry.head):
                raise GrantError(
                    f"{path}, with {chain.charges} charges, is older than the ledger that was at {entry.path} with "
                    f"{entry.charges}: put the newest one back, {entry.way_out}"
                )
        if records not in {entry.records for entry in known}:
            self._check_overlap(silo, path)
        return known

    def _check_overlap(self, silo: Silo, path: Path) -> None:
        sketch = self._sketch(silo)
        for entry in self.entries():
            part = overlap(sketch, np.frombuffer(entry.sketch, dtype=np.uint64))
            if part >= OVERLAP:
                raise GrantError(
                    f"{path} would be a second ledger of records that {entry.path} keeps account of: about "
                    f"{100 * part:.0f} % of those of silo '{silo.name}', or of those there, are the same; use that one "
                    f"with the records that it was begun for, {entry.way_out}"
                )

    def _sketch(self, silo: Silo) -> Hashes:
        """The smallest keyed hashes of a silo's records, whatever their labels and order, and each once."""
        hashes = [
            int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8, key=self._key).digest(), "little")
            for start in range(0, len(silo), ROWS)
            for row in silo.train.modality.decode(silo.train.x[start : start + ROWS]).flatten(1).cpu().numpy()
        ]
        return np.unique(np.array(hashes, dtype=np.uint64))[:SKETCH]

    def _found(self, condition: str, *values: str) -> Iterator[RegisteredLedger]:
        query = f"SELECT records, silo, sketch, ledger, path, charges, head FROM entries WHERE {condition}"
        for records, silo, sketch, ledger, path, charges, head in self._rows(query, *values):
            yield RegisteredLedger(records, silo, sketch, ledger, Path(path), charges, head)


def overlap(one: Hashes, other: Hashes) -> float:
    """An estimate from two sketches: which part of the records behind one is behind the other, the larger of the two.

    Both hold all their hashes up to some number. Below the smaller of these numbers they are samples of the two sets in
    which equal records are always drawn together, so that a small set is found in a large one too.
    """
    reach = min(_reach(one), _reach(other))
    one, other = one[one <= reach], other[other <= reach]
    fewest = min(len(one), len(other))
    return len(np.intersect1d(one, other)) / fewest if fewest else 0.0


def _reach(sketch: Hashes) -> int:
    """Up to which number a sketch holds all hashes."""
    return int(sketch[-1]) if len(sketch) == SKETCH else 2**64 - 1


def _lies_at(path: Path, identity: str) -> bool:
    """Whether a ledger is at a path; one that cannot be read may be it."""
    try:
        if not path.is_file():
            return False
        ledger = Ledger(path, read_only=True)
    except (OSError, RunFolderError):
        return True
    try:
        return ledger.identity == identity
    finally:
        ledger.close()


def _name_of(key: bytes) -> str:
    """Tells keys apart and gives none away."""
    return hashlib.sha256(b"fedloom registry key/" + key).hexdigest()[:16]


def _write_secret(path: Path, data: bytes) -> None:
    """Whole or not at all, and for its owner alone from the first moment on."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    Path(temporary).replace(path)
