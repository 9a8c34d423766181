"""Reading the files of a run folder that may be damaged: what cannot be read becomes a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedloom.errors import FedloomError
from fedloom.reports.logs import UNREADABLE, read_rows
from fedloom.runs.folder import RunFolder
from fedloom.runs.guarantee import guarantee_of

Found = TypeVar("Found")


@dataclass(frozen=True)
class FolderReader:
    """The files by name, and what was wrong with them."""

    folder: RunFolder
    problems: list[str] = field(default_factory=list)

    def read(self, name: str, reader: Callable[[Path], Found], nothing: Found) -> Found:
        """What a reader finds in a file."""
        try:
            return reader(self.folder.path / name)
        except UNREADABLE as error:
            self.problems.append(f"{name} cannot be read ({type(error).__name__})")
            return nothing

    def rows(self, name: str) -> list[dict[str, Any]]:
        """A log."""
        return self.read(name, read_rows, [])

    def mapping(self, name: str) -> dict[str, Any]:
        """A table, and those in it; nothing where there is no such file."""
        return self.read(name, _table, {})

    def privacy(self) -> dict[str, Any]:
        """What the settings and the ledger say, where a mechanism was asked for."""
        if self.folder.config.privacy.mechanism == "none":
            return {}
        try:
            return guarantee_of(self.folder).to_mapping()
        except FedloomError as error:
            self.problems.append(str(error))
        except Exception as error:  # a stranger's ledger may hold anything where events and budgets stand
            self.problems.append(f"{self.folder.ledger.name} cannot be read ({type(error).__name__})")
        return {"guarantee": "no DP guarantee: the ledger cannot be read"}


def _table(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return _two_levels(found) if isinstance(found, dict) else {}


def _two_levels(found: Mapping[str, Any]) -> dict[str, Any]:
    """Single values, and those of tables as ``table.key``; whatever lies deeper is nothing that fedloom writes."""
    plain = {key: value for key, value in found.items() if isinstance(value, str | int | float)}
    tables = {key: value for key, value in found.items() if isinstance(value, dict)}
    for key, table in tables.items():
        plain |= {f"{key}.{name}": value for name, value in table.items() if isinstance(value, str | int | float)}
    return plain
