"""The schema of a table: what each column may hold, agreed on before anybody looks at records.

A value is one number: of a categorical or ordinal column the number of its level, of a date its days since 1970, else
itself; NaN where there is none. For sums it becomes a code: the number of its level or bin, the last one for no value.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import ConfigError
from fedloom.modalities.rules import NUMBERS, Rule, breaking, rule_of
from fedloom.settings import parse

Kind = Literal["categorical", "ordinal", "integer", "continuous", "date"]
Numbers = NDArray[np.float64]
Codes = NDArray[np.int64]
TYPES = {"integer": "int64", "continuous": "float64", "date": "date32"}  # of columns without levels
EPOCH = datetime.date(1970, 1, 1)
LARGEST = 1_000  # levels or bins of a column: beyond it noise drowns every cell of a pair
NULLS = frozenset(("", ".", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"))


@dataclass(frozen=True, kw_only=True)
class ColumnSettings:
    """A column as a schema file declares it."""

    kind: Kind
    levels: tuple[str, ...] = ()  # of a categorical column, or of an ordinal one in their order
    other: str = ""  # the level that stands for those that are not named; "": they are refused
    bounds: tuple[float, ...] = ()  # least and largest number; of a date its days, or "first" and "last"
    first: str = ""  # the earliest date
    last: str = ""  # the latest
    edges: tuple[float, ...] = ()  # where bins begin and end, from the least to the largest number
    bins: int = 16  # of equal width, unless edges are given
    null: bool = False  # whether a value may be missing


@dataclass(frozen=True, kw_only=True)
class SchemaSettings:
    """A schema file."""

    target: str = ""  # the column that people want to foretell, if there is one
    subject: str = ""  # the column that says whose record it is; it is never learned
    silo: str = ""  # the column that says which silo a record belongs to; it is never learned
    ignored: tuple[str, ...] = ()  # columns of files that are left out, such as names and free text
    rules: tuple[str, ...] = ()  # what records keep to, such as "first <= last"; see fedloom.modalities.rules
    broken: Literal["refused", "accepted"] = "refused"  # records of files that break a rule
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class SchemaColumn:
    """One column: its values, its codes, and the way from one to the other."""

    name: str
    kind: Kind
    levels: tuple[str, ...]
    other: str
    edges: tuple[float, ...]  # of bins; none where there are levels
    null: bool

    @classmethod
    def of(cls, name: str, settings: ColumnSettings) -> SchemaColumn:
        """A column as declared, checked."""
        where = f"columns.{name}"
        if settings.kind in ("categorical", "ordinal"):
            return cls(name, settings.kind, _levels(where, settings), settings.other, (), settings.null)
        edges = _edges(where, settings)
        return cls(name, settings.kind, (), "", edges, settings.null)

    @property
    def size(self) -> int:
        """How many codes it has."""
        return (len(self.levels) or len(self.edges) - 1) + self.null

    @property
    def nothing(self) -> int:
        """The code of no value, where there may be none."""
        return self.size - 1

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return self.kind != "continuous"

    @property
    def least(self) -> float:
        """Its least value, as a number."""
        return 0.0 if self.levels else float(math.ceil(self.edges[0])) if self.whole else self.edges[0]

    @property
    def largest(self) -> float:
        """Its largest value, as a number."""
        if self.levels:
            return float(len(self.levels) - 1)
        return float(math.floor(self.edges[-1])) if self.whole else self.edges[-1]

    @property
    def family(self) -> str:
        """Columns of one family have one order; levels without order have none."""
        if self.kind == "ordinal":
            return f"levels {self.levels}"
        return "" if self.levels else self.kind

    @property
    def type(self) -> str:
        """What Arrow calls its cells."""
        return "string" if self.levels else TYPES[self.kind]

    def read(self, cells: Sequence[Any]) -> tuple[Numbers, list[str]]:
        """The values of cells as a file gives them, and what is wrong with some of them, without saying whose they are.

        A value that cannot be is NaN.
        """
        found, missing = self._numbered(cells)
        problems = []
        if missing.any() and not self.null:
            problems.append(f"column '{self.name}' has {int(missing.sum())} empty cells, and null = false")
        foreign = np.isnan(found) & ~missing
        if foreign.any():
            wanted = "a level of the schema" if self.levels else f"a {'date' if self.kind == 'date' else 'number'}"
            problems.append(f"column '{self.name}' has {int(foreign.sum())} cells that are not {wanted}")
        if self.edges:
            outside = (found < self.edges[0]) | (found > self.edges[-1])
            if outside.any():
                low, high = (self.cell(edge) for edge in (self.edges[0], self.edges[-1]))
                problems.append(f"column '{self.name}' has {int(outside.sum())} cells outside [{low}, {high}]")
            if self.whole and bool((found[~np.isnan(found)] % 1 != 0).any()):
                problems.append(f"column '{self.name}' is of whole numbers, and some of its cells are not")
        return found, problems

    def _numbered(self, cells: Sequence[Any]) -> tuple[Numbers, NDArray[np.bool_]]:
        """Each cell as a number, NaN where it is none, and whether it is empty."""
        if isinstance(cells, np.ndarray) and np.issubdtype(cells.dtype, np.number) and self.kind in NUMBERS:
            numbers = cells.astype(np.float64)
            return numbers, np.isnan(numbers)
        which: dict[Any, int] = {}  # cells repeat: each is looked at once
        place = np.array([which.setdefault(cell, len(which)) for cell in cells], dtype=np.int64)
        found = np.array([self._number(cell) for cell in which], dtype=np.float64)[place]
        return found, np.array([is_missing(cell) for cell in which], dtype=bool)[place]

    def _number(self, cell: Any) -> float:
        if is_missing(cell):
            return math.nan
        if self.levels:
            text = text_of(cell)
            found = (self._numbers[name] for name in (text, whole_text(text), self.other) if name in self._numbers)
            return float(next(found, math.nan))
        try:
            if self.kind == "date":
                return float((_date(cell) - EPOCH).days)
            return float(cell)
        except (TypeError, ValueError, OverflowError):
            return math.nan

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return {level: number for number, level in enumerate(self.levels)}

    def codes(self, values: Numbers) -> Codes:
        """The code of each value; numbers outside the bounds count as the nearest one inside."""
        if self.levels:
            found = np.clip(np.nan_to_num(values), 0, len(self.levels) - 1).astype(np.int64)
        else:
            found = np.searchsorted(np.array(self.edges[1:-1]), np.nan_to_num(values), side="right")
        return np.where(np.isnan(values), self.nothing, found)

    def values(self, codes: Codes, uniform: Numbers) -> Numbers:
        """A value for each code: of a bin one that is drawn from it, by a number in [0, 1)."""
        if self.levels:
            found = codes.astype(np.float64)
        else:
            edges, bins = np.array(self.edges), np.minimum(codes, len(self.edges) - 2)
            low, high = edges[bins], edges[bins + 1]
            if self.whole:  # a bin holds its lower edge and not its upper one, but for the last, which holds both
                first, last = np.ceil(low), np.where(bins == len(edges) - 2, np.floor(high), np.ceil(high) - 1)
                found = first + np.floor(uniform * (np.maximum(last, first) - first + 1))
            else:
                found = low + uniform * (high - low)
        return np.where((codes == self.nothing) & self.null, np.nan, found)

    def cell(self, value: float) -> Any:
        """A value as a file holds it: text, whole number, number, date or None."""
        if math.isnan(value):
            return None
        if self.levels:
            return self.levels[int(value)]
        if self.kind == "date":
            return EPOCH + datetime.timedelta(days=int(value))
        return int(value) if self.whole else float(value)


@dataclass(frozen=True)
class Schema:
    """All columns that are learned, and what else a table's file says."""

    columns: tuple[SchemaColumn, ...]
    target: str
    subject: str
    silo: str
    ignored: tuple[str, ...]
    rules: tuple[str, ...]
    broken: str

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Schema:
        """The schema that a TOML file's tree declares."""
        settings = parse(SchemaSettings, dict(tree))
        if not settings.columns:
            raise ConfigError("a schema needs columns; 'fedloom data schema FILE' proposes some")
        aside = (settings.subject, settings.silo)
        columns = tuple(
            SchemaColumn.of(name, parse(ColumnSettings, declared, f"columns.{name}"))
            for name, declared in settings.columns.items()
            if name not in aside
        )
        if not columns:
            raise ConfigError("a schema needs a column beside those that say whose a record is")
        names = {column.name for column in columns}
        if settings.target and settings.target not in names:
            raise ConfigError(f"target = '{settings.target}' is no column of the schema")
        found = cls(columns, settings.target, *aside, settings.ignored, settings.rules, settings.broken)
        assert len(found.checks) == len(settings.rules)  # a rule that says nothing is refused here
        return found

    @classmethod
    def read(cls, text: str) -> Schema:
        """What :attr:`text` gave."""
        try:
            tree = json.loads(text)
            columns = {column.pop("name"): column for column in tree.pop("columns")}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"the schema in the name of a table's modality cannot be read: {error}") from error
        return cls.of({**tree, "columns": columns})

    @cached_property
    def checks(self) -> tuple[Rule, ...]:
        """The rules, read."""
        return tuple(rule_of(text, self.columns) for text in self.rules)

    def broken_rules(self, values: Numbers) -> list[str]:
        """A sentence for each rule that some of the records break."""
        counts = zip(self.rules, breaking(self.checks, values), strict=True)
        return [f"{count} of {len(values)} records break the rule '{rule}'" for rule, count in counts if count]

    @cached_property
    def text(self) -> str:
        """The schema as one line, the same for equal schemas: it is part of the name of a table's modality."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True, ensure_ascii=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns, in their order."""
        return tuple(column.name for column in self.columns)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many codes each column has."""
        return tuple(column.size for column in self.columns)

    def codes(self, values: Numbers) -> Codes:
        """(n, columns) values as codes."""
        return np.stack([column.codes(values[:, i]) for i, column in enumerate(self.columns)], axis=1)

    def values(self, codes: Codes, uniform: Numbers) -> Numbers:
        """(n, columns) codes as values."""
        return np.stack([c.values(codes[:, i], uniform[:, i]) for i, c in enumerate(self.columns)], axis=1)


def _levels(where: str, settings: ColumnSettings) -> tuple[str, ...]:
    levels = settings.levels
    if settings.other and settings.other not in levels:
        levels = (*levels, settings.other)
    if len(set(levels)) != len(levels):
        raise ConfigError(f"{where}.levels names a level twice")
    if not 1 <= len(levels) <= LARGEST:
        raise ConfigError(f"{where}.levels has {len(levels)} levels; give 1 to {LARGEST}")
    return levels


def _edges(where: str, settings: ColumnSettings) -> tuple[float, ...]:
    edges = settings.edges
    if not edges:
        if settings.kind == "date" and settings.first and settings.last:
            low, high = (_day(f"{where}.{name}", getattr(settings, name)) for name in ("first", "last"))
        elif len(settings.bounds) == 2:
            low, high = settings.bounds
        else:
            wanted = "first and last" if settings.kind == "date" else "bounds = [least, largest]"
            raise ConfigError(f"{where} needs {wanted}, or edges: they are public, and never taken from records")
        whole = settings.kind != "continuous"
        bins = min(settings.bins, int(high - low + 1)) if whole else settings.bins
        edges = tuple(float(edge) for edge in np.linspace(low, high, max(bins, 1) + 1))
        if whole:
            edges = (*dict.fromkeys([float(low), *(float(math.ceil(edge)) for edge in edges[1:-1]), float(high)]),)
            edges = edges if len(edges) > 1 else (edges[0], edges[0])
    if len(edges) < 2 or any(not a <= b for a, b in pairwise(edges)) or edges[0] > edges[-1]:
        raise ConfigError(f"{where}.edges must rise, and be two or more")
    if len(edges) > LARGEST:
        raise ConfigError(f"{where} has {len(edges) - 1} bins; give at most {LARGEST - 1}")
    return edges


def is_missing(cell: Any) -> bool:
    """Whether a cell of a file holds no value."""
    return (
        cell is None
        or (isinstance(cell, float) and math.isnan(cell))
        or (isinstance(cell, str) and cell.strip() in NULLS)
    )


def text_of(cell: Any) -> str:
    """A cell as the name of a level: whole numbers have no fraction."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell).strip()


def whole_text(text: str) -> str:
    """A whole number's text without a fraction of zeros, which a file has where others of its column are missing."""
    return re.sub(r"(?<=\d)\.0+$", "", text)


def _day(where: str, text: str) -> float:
    try:
        return float((_date(text) - EPOCH).days)
    except ValueError as error:
        raise ConfigError(f"{where} = '{text}' is no date of the form YYYY-MM-DD") from error


def _date(cell: Any) -> datetime.date:
    if isinstance(cell, datetime.datetime):
        return cell.date()
    if isinstance(cell, datetime.date):
        return cell
    return datetime.date.fromisoformat(str(cell)[:10])
