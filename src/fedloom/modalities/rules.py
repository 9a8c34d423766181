"""Rules between columns that every record keeps to, as a schema writes them.

    admitted <= discharged                  numbers, dates or levels of one order
    paid + owed = price                     of two columns or more; the last one follows from the others
    if sex is male then pregnant is no      levels; "null" is no value, and "is not" may stand before "then"

A comparison or a sum with a missing value is kept. Records of a file are checked; made-up ones are drawn again, and
where that does not help, changed so that the rules are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import ConfigError, unknown

Numbers = NDArray[np.float64]
Truths = NDArray[np.bool_]
NULL = "null"
NUMBERS = ("integer", "continuous")  # families whose values add up
TRIES = 8  # rows from which one is chosen that keeps to the rules
PASSES = 4  # of repairs, which may undo one another
TOLERANCE = 1e-9  # of a sum of numbers that are not whole, beside its bounds
IMPLICATION = re.compile(r"if (?P<column>.+?) is (?P<negated>not )?(?P<level>.+?) then (?P<then>.+?) is (?P<leads>.+)")


class Ranged(Protocol):
    """What a rule asks of a column."""

    @property
    def name(self) -> str:
        """As files call it."""
        ...

    @property
    def levels(self) -> tuple[str, ...]:
        """None where it holds numbers."""
        ...

    @property
    def null(self) -> bool:
        """Whether a value may be missing."""
        ...

    @property
    def family(self) -> str:
        """Columns of one family can be compared."""
        ...

    @property
    def least(self) -> float:
        """The least value."""
        ...

    @property
    def largest(self) -> float:
        """The largest value."""
        ...


class Rule(Protocol):
    """What holds of a record."""

    @property
    def derives(self) -> bool:
        """Whether no draw would keep to it by chance, so that one is always changed."""
        ...

    def holds(self, values: Numbers) -> Truths:
        """Of each of (n, columns) values."""
        ...

    def repaired(self, values: Numbers) -> Numbers:
        """The same values where it holds, else near ones inside the bounds."""
        ...


@dataclass(frozen=True)
class AtMost:
    """One column is at most another."""

    low: int
    high: int
    least: float  # the least value of the lower column

    derives = False

    def holds(self, values: Numbers) -> Truths:
        """Where both are known."""
        return ~(values[:, self.low] > values[:, self.high])

    def repaired(self, values: Numbers) -> Numbers:
        """Both are what the higher column has, or the least that the lower one can be."""
        both = np.maximum(values[:, self.high], self.least)
        found, broken = values.copy(), ~self.holds(values)
        for column in (self.low, self.high):
            found[broken, column] = both[broken]
        return found


@dataclass(frozen=True)
class SumOf:
    """Some columns add up to another, which comes last."""

    columns: tuple[int, ...]
    bounds: tuple[tuple[float, float], ...]

    derives = True

    def holds(self, values: Numbers) -> Truths:
        """Where all are known."""
        *parts, total = self.columns
        left: Numbers = np.abs(values[:, parts].sum(axis=1) - values[:, total])
        scale = max(1.0, *(abs(bound) for pair in self.bounds for bound in pair))
        kept: Truths = ~(left > TOLERANCE * scale)
        return kept

    def repaired(self, values: Numbers) -> Numbers:
        """The total follows; where it would leave its bounds, one part after the other does."""
        found, broken = values.copy(), ~self.holds(values)
        *parts, total = self.columns
        found[broken, total] = np.clip(found[broken][:, parts].sum(axis=1), *self.bounds[-1])
        for part, bounds in zip(parts, self.bounds, strict=False):
            rest = found[broken, total] - found[broken][:, [other for other in parts if other != part]].sum(axis=1)
            found[broken, part] = np.clip(rest, *bounds)
        return found


@dataclass(frozen=True)
class IfThen:
    """A level of one column leads to a level of another; NaN stands for no value."""

    column: int
    level: float
    negated: bool
    then: int
    leads: float

    derives = False

    def holds(self, values: Numbers) -> Truths:
        """Where the first is not so, or the second is."""
        kept: Truths = (_is(values[:, self.column], self.level) == self.negated) | _is(values[:, self.then], self.leads)
        return kept

    def repaired(self, values: Numbers) -> Numbers:
        """The second is made so."""
        found = values.copy()
        found[~self.holds(values), self.then] = self.leads
        return found


def rule_of(text: str, columns: Sequence[Ranged]) -> Rule:
    """The rule that a line of a schema states."""
    where = f"rules: '{text}'"
    if said := IMPLICATION.fullmatch(text.strip()):
        column, level = _level(where, said["column"], said["level"], columns)
        then, leads = _level(where, said["then"], said["leads"], columns)
        return IfThen(column, level, bool(said["negated"]), then, leads)
    if text.count(" <= ") == 1:
        pair = [_place(where, name, columns) for name in text.split(" <= ")]
        low, high = _alike(where, pair, columns)
        if low.least > high.largest:
            raise ConfigError(f"{where} can never hold: the bounds of its columns are against it")
        return AtMost(pair[0], pair[1], low.least)
    if text.count(" = ") == 1:
        parts, total = text.split(" = ")
        places = [_place(where, name, columns) for name in (*parts.split(" + "), total)]
        bounds = tuple((column.least, column.largest) for column in _alike(where, places, columns))
        if any(columns[place].family not in NUMBERS for place in places):
            raise ConfigError(f"{where}: only whole numbers, or continuous ones, add up")
        *lower, (least, largest) = bounds
        if sum(low for low, _ in lower) > largest or sum(high for _, high in lower) < least:
            raise ConfigError(f"{where} can never hold: the bounds of its columns are against it")
        return SumOf(tuple(places), bounds)
    raise ConfigError(f"{where} is no rule; write 'a <= b', 'a + b = c' or 'if a is x then b is y'")


def breaking(rules: Sequence[Rule], values: Numbers) -> list[int]:
    """How many records break each rule."""
    return [int((~rule.holds(values)).sum()) for rule in rules]


def keeping(rules: Sequence[Rule], draws: NDArray[np.float64]) -> Numbers:
    """Of (tries, n, columns) draws each record's first that keeps to all rules; changed where none does."""
    tries, records, columns = draws.shape
    values = draws.reshape(-1, columns)
    for rule in (rule for rule in rules if rule.derives):
        values = rule.repaired(values)
    kept = _all_hold(rules, values).reshape(tries, records)
    found: Numbers = values.reshape(draws.shape)[np.argmax(kept, axis=0), np.arange(records)]
    for _ in range(PASSES):
        if _all_hold(rules, found).all():
            return found
        for rule in rules:
            found = rule.repaired(found)
    if _all_hold(rules, found).all():
        return found
    raise ConfigError("the schema's rules cannot all be kept together: one takes back what another asks for")


def _all_hold(rules: Sequence[Rule], values: Numbers) -> Truths:
    found = np.ones(len(values), dtype=np.bool_)
    for rule in rules:
        found &= rule.holds(values)
    return found


def _is(values: Numbers, level: float) -> Truths:
    found: Truths = np.isnan(values) if np.isnan(level) else values == level
    return found


def _place(where: str, name: str, columns: Sequence[Ranged]) -> int:
    names = [column.name for column in columns]
    if name.strip() not in names:
        raise ConfigError(f"{where}: " + unknown("column", name.strip(), names))
    return names.index(name.strip())


def _alike(where: str, places: Sequence[int], columns: Sequence[Ranged]) -> list[Ranged]:
    found = [columns[place] for place in places]
    if len(set(places)) < max(2, len(places)):
        raise ConfigError(f"{where} names a column twice")
    for column in found:
        if not column.family:
            raise ConfigError(f"{where}: the levels of column '{column.name}' have no order")
        if column.family != found[0].family:
            raise ConfigError(f"{where}: columns '{found[0].name}' and '{column.name}' are of different kinds")
    return found


def _level(where: str, name: str, level: str, columns: Sequence[Ranged]) -> tuple[int, float]:
    place = _place(where, name, columns)
    column = columns[place]
    if level == NULL:
        if not column.null:
            raise ConfigError(f"{where}: column '{column.name}' has null = false")
        return place, float("nan")
    if level not in column.levels:
        raise ConfigError(f"{where}: " + unknown("level", level, (*column.levels, *((NULL,) if column.null else ()))))
    return place, float(column.levels.index(level))
