"""SQLite files that are whole after every commit and say in one sentence what is wrong with them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from fedloom.errors import RunFolderError

WAIT = 60.0  # seconds that a process waits for another's change
GLANCE = 5.0  # seconds that one waits who only reads


class Database:
    """The file at a path, made if it is not there; several processes may hold it at once.

    To read alone changes nothing: no file is made, and one of an older version stays as it is.
    """

    KIND: ClassVar[str]  # what sentences call it
    APPLICATION: ClassVar[int]
    SCHEMA: ClassVar[int]
    TABLES: ClassVar[tuple[str, ...]]
    MIGRATIONS: ClassVar[Mapping[int, tuple[str, ...]]] = {}  # older schema -> what makes it the present one
    # One file that is whole after every commit: no log beside it that a copy could leave behind, and what is written
    # over is not left in the file.
    PRAGMAS: ClassVar[tuple[str, ...]] = ("journal_mode = DELETE", "synchronous = EXTRA", "secure_delete = ON")
    THREADS: ClassVar[bool] = False  # whether several threads of a process use it, one at a time

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        with self._explained():
            if read_only:
                address = f"{path.absolute().as_uri()}?mode=ro"
                self._connection = sqlite3.connect(address, uri=True, timeout=GLANCE, isolation_level=None)
            else:
                own = not self.THREADS
                self._connection = sqlite3.connect(path, timeout=WAIT, isolation_level=None, check_same_thread=own)
                self._prepare()
        application, self._schema = self._version
        readable = {self.SCHEMA, *(self.MIGRATIONS if read_only else ())}
        if application != self.APPLICATION or self._schema not in readable:
            self.close()
            raise RunFolderError(f"{path} is not a {self.KIND} that this version of fedloom can read")

    def _prepare(self) -> None:
        """Make the tables, or bring those of an older version up to date."""
        for pragma in self.PRAGMAS:
            self._connection.execute(f"PRAGMA {pragma}")
        with self._transaction():
            application, schema = self._version
            statements: tuple[str, ...] = ()
            if not self._value("SELECT count(*) FROM sqlite_master"):
                statements = (f"PRAGMA application_id = {self.APPLICATION}", *self.TABLES)
            elif application == self.APPLICATION:
                statements = self.MIGRATIONS.get(schema, ())
            for statement in (*statements, f"PRAGMA user_version = {self.SCHEMA}") if statements else ():
                self._connection.execute(statement)

    @property
    def _version(self) -> tuple[int, int]:
        return self._value("PRAGMA application_id"), self._value("PRAGMA user_version")

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def _rows(self, query: str, *values: str | int) -> list[tuple[Any, ...]]:
        with self._explained():
            return self._connection.execute(query, values).fetchall()

    def _value(self, query: str, *values: str | int) -> Any:
        return self._rows(query, *values)[0][0]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, one process at a time from the first read on."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise RunFolderError(self._complaint(error)) from error

    def _complaint(self, error: sqlite3.DatabaseError) -> str:
        return f"cannot use the {self.KIND} {self.path}: {error}"
