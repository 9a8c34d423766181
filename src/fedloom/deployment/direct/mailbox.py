"""Orders and answers on disk, at either end: whatever process dies, the next one finds them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import ClassVar

from fedloom.deployment.direct.letters import Letter
from fedloom.privacy.database import Database

OPEN, ANSWERED, DONE = "open", "answered", "done"


class Mailbox(Database):
    """One file with one writer, whose threads take turns.

    At the server an order is open until its silo has answered, and done when the run has taken the answer. At a silo
    it is open until the worker has answered, and done when the server has the answer.
    """

    KIND = "mailbox"
    APPLICATION = 0x0FED0028
    SCHEMA = 1
    TABLES = (
        "CREATE TABLE letters (number TEXT PRIMARY KEY, silo TEXT NOT NULL, run TEXT NOT NULL, round INTEGER NOT NULL, "
        "state TEXT NOT NULL, letter BLOB NOT NULL, answer BLOB)",
        "CREATE TABLE named (number TEXT NOT NULL REFERENCES letters ON DELETE CASCADE, sha256 TEXT NOT NULL)",
        "CREATE INDEX named_by ON named (number)",
    )
    # What a power cut takes away is asked for again; a process that dies takes nothing away.
    PRAGMAS: ClassVar[tuple[str, ...]] = ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON")
    THREADS: ClassVar[bool] = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._turn = threading.RLock()

    def put(self, silo: str, run: str, round: int, letter: Letter) -> Letter:
        """Keep an order, unless it is here already; one whose answer was that it failed is open again."""
        with self._turn, self._explained(), self._transaction():
            known = self._known(letter.number)
            if known is None:
                self._store(silo, run, round, letter)
                return letter
            _, before, answer = known
            if answer is None or answer.kind != "failed":
                return before
            anew = before.again()
            change = "UPDATE letters SET state = ?, letter = ?, answer = NULL WHERE number = ?"
            self._connection.execute(change, (OPEN, anew.to_bytes(), letter.number))
            return anew

    def replace(self, silo: str, letter: Letter) -> None:
        """At a silo: keep an order as it was sent just now, which is a new attempt."""
        with self._turn, self._explained(), self._transaction():
            self._connection.execute("DELETE FROM letters WHERE number = ?", (letter.number,))
            self._store(silo, "", 0, letter)

    def answer(self, letter: Letter) -> bool:
        """Keep the answer to an order that is open, at the attempt at which it is; whether it was taken."""
        with self._turn, self._explained(), self._transaction():
            known = self._known(letter.number)
            if known is None or known[0] != OPEN or known[1].attempt != letter.attempt:
                return False
            change = "UPDATE letters SET state = ?, answer = ? WHERE number = ?"
            self._connection.execute(change, (ANSWERED, letter.to_bytes(), letter.number))
            self._name(letter)
            return True

    def done(self, *numbers: str) -> None:
        """Nobody waits for these answers any more."""
        change = "UPDATE letters SET state = ? WHERE number IN (SELECT value FROM json_each(?))"
        with self._turn, self._explained():
            self._connection.execute(change, (DONE, json.dumps(numbers)))

    def undone(self, number: str) -> None:
        """Whether the answer was taken is to be asked again."""
        with self._turn, self._explained():
            change = "UPDATE letters SET state = ? WHERE number = ? AND state = ?"
            self._connection.execute(change, (ANSWERED, number, DONE))

    def state(self, number: str) -> tuple[str, Letter, Letter | None] | None:
        """Of an order: how it is, itself, and its answer; None where it is not known."""
        with self._turn, self._explained():
            return self._known(number)

    def silo_of(self, number: str) -> str:
        """Whose an order is; empty where it is not known."""
        with self._turn:
            rows = self._rows("SELECT silo FROM letters WHERE number = ?", number)
        return str(rows[0][0]) if rows else ""

    def open(self, silo: str) -> list[Letter]:
        """The orders of a silo that are open, oldest first."""
        with self._turn:
            rows = self._rows("SELECT letter FROM letters WHERE silo = ? AND state = ? ORDER BY rowid", silo, OPEN)
        return [Letter.of_bytes(row[0]) for row in rows]

    def answered(self) -> list[Letter]:
        """The answers that nobody has taken yet, oldest first."""
        with self._turn:
            rows = self._rows("SELECT answer FROM letters WHERE state = ? ORDER BY rowid", ANSWERED)
        return [Letter.of_bytes(row[0]) for row in rows]

    def answers(self, numbers: list[str]) -> list[Letter]:
        """The answers to some of the orders, as far as they are here, oldest order first."""
        among = "number IN (SELECT value FROM json_each(?))"
        query = f"SELECT answer FROM letters WHERE {among} AND state != ? AND answer NOT NULL ORDER BY rowid"
        with self._turn:
            rows = self._rows(query, json.dumps(numbers), OPEN)
        return [Letter.of_bytes(row[0]) for row in rows]

    def names(self, number: str, digest: str) -> bool:
        """Whether an order or its answer has a part of this digest."""
        with self._turn:
            return bool(self._rows("SELECT 1 FROM named WHERE number = ? AND sha256 = ?", number, digest))

    def forget(self, number: str) -> None:
        """Strike out an order."""
        with self._turn, self._explained():
            self._connection.execute("DELETE FROM letters WHERE number = ?", (number,))

    def forget_done(self, silo: str, run: str, before: int) -> None:
        """Strike out what is done of a silo's earlier rounds of a run."""
        query = "DELETE FROM letters WHERE silo = ? AND run = ? AND round < ? AND state = ?"
        with self._turn, self._explained():
            self._connection.execute(query, (silo, run, before, DONE))

    def forget_run(self, run: str) -> None:
        """Strike out all orders of a run."""
        with self._turn, self._explained():
            self._connection.execute("DELETE FROM letters WHERE run = ?", (run,))

    def forget_all_done(self) -> None:
        """Strike out all that is done."""
        with self._turn, self._explained():
            self._connection.execute("DELETE FROM letters WHERE state = ?", (DONE,))

    @property
    def named(self) -> set[str]:
        """The digests of all parts that a letter names."""
        with self._turn:
            return {row[0] for row in self._rows("SELECT DISTINCT sha256 FROM named")}

    def _known(self, number: str) -> tuple[str, Letter, Letter | None] | None:
        rows = self._rows("SELECT state, letter, answer FROM letters WHERE number = ?", number)
        if not rows:
            return None
        state, letter, answer = rows[0]
        return str(state), Letter.of_bytes(letter), Letter.of_bytes(answer) if answer is not None else None

    def _store(self, silo: str, run: str, round: int, letter: Letter) -> None:
        row = "INSERT INTO letters (number, silo, run, round, state, letter) VALUES (?, ?, ?, ?, ?, ?)"
        self._connection.execute(row, (letter.number, silo, run, round, OPEN, letter.to_bytes()))
        self._name(letter)

    def _name(self, letter: Letter) -> None:
        digests = {part.sha256 for part in letter.parts}
        self._connection.executemany(
            "INSERT INTO named (number, sha256) VALUES (?, ?)", [(letter.number, digest) for digest in sorted(digests)]
        )
