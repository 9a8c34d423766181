"""A proposal of a schema by what files hold: a start for people, who decide what of it is public.

Levels and bounds that are read off records say something about them, and no epsilon covers it. So each line that came
from records is marked; whoever agrees on the schema replaces it, or declares it public.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.errors import DataError
from fedloom.federation.tables import Table, read_table
from fedloom.modalities.schema import Kind, SchemaColumn, is_missing, text_of, whole_text
from fedloom.settings import Settings

MARK = "# from records"
HEADING = f"""\
# Proposed from {{files}}. Each line with "{MARK}" says something about the people whose records these are:
# replace it by what is known without them, such as a code book, or declare it public. Only then train.

"""
# Words of a column's name that say who somebody is, or where to find them.
IDENTIFIER = re.compile(
    "name|(sur|first|last|user)name|p?id|identifier|uuid|guid|ssn|nin|mrn|nhs|passport|insurance|account|iban|e?mail|"
    "phone|telephone|tel|mobile|fax|address|street|zip|zipcode|postcode|ip|url|notes?|comments?",
    re.IGNORECASE,
)
PERSON = re.compile("patients?|persons?|subjects?|members?", re.IGNORECASE)  # a whole name
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
BARE = re.compile(r"[A-Za-z0-9_-]+")
FEW = 10  # whole numbers so few are levels in order
MOST = 100  # texts of more kinds than these, or longer than these letters, are free text
LONG = 40


@dataclass(frozen=True)
class Proposed:
    """A column: its settings, read off its cells; or why it is left out."""

    settings: Settings
    ignored: str = ""


def proposed_schema(files: Sequence[Path]) -> str:
    """A schema file's text that fits all of the files."""
    tables = [read_table(file) for file in files]
    names = list(tables[0])
    for file, table in zip(files, tables, strict=True):
        if differ := sorted(set(names) ^ set(table)):
            raise DataError(f"{file} and {files[0]} differ in the columns {', '.join(differ)}; give files of one kind")
    joined: Table = {name: [cell for table in tables for cell in table[name]] for name in names}
    if not any(joined.values()):
        raise DataError(f"{files[0]} holds no rows to propose a schema from")
    found = {name: propose(name, cells) for name, cells in joined.items()}
    left_out = {name: column.ignored for name, column in found.items() if column.ignored}
    lines = [HEADING.format(files=", ".join(file.name for file in files))]
    if left_out:
        lines += ["ignored = [\n", *(f"    {json.dumps(name)},  # {why}\n" for name, why in left_out.items()), "]\n"]
    for name, column in found.items():
        if not column.ignored:
            key = name if BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)
            lines.append(f"\n[columns.{key}]\n")
            lines += [f"{field} = {_toml(value)}{_mark(field)}\n" for field, value in column.settings.items()]
    return "".join(lines)


def propose(name: str, cells: Sequence[Any]) -> Proposed:
    """A column by its name and its cells."""
    if PERSON.fullmatch(name) or any(map(IDENTIFIER.fullmatch, WORDS.findall(name))):
        return Proposed({}, "by its name: who somebody is, or free text; it may be named as 'subject' or 'silo'")
    known = [cell for cell in cells if not is_missing(cell)]
    if not known:
        return Proposed({}, "empty throughout")
    settings = next((found for kind in KINDS if (found := kind(known))), None)
    if settings is None:
        return Proposed({}, "free text, or different in almost every record")
    return Proposed(settings | ({"null": True} if len(known) < len(cells) else {}))


def _read(kind: Kind, cells: Sequence[Any]) -> list[float] | None:
    """Cells as values of that kind, if all of them are."""
    values, problems = _unbounded(kind).read(cells)
    return None if problems or not all(map(math.isfinite, values)) else values.tolist()


def _unbounded(kind: Kind) -> SchemaColumn:
    return SchemaColumn("", kind, (), "", (), null=False)


def _levels(cells: Sequence[Any]) -> Settings | None:
    found = sorted({text_of(cell) for cell in cells})
    if len(found) > MOST or max(map(len, found)) > LONG or len(found) == len(cells) > FEW:
        return None
    return {"kind": "categorical", "levels": found}


def _whole(cells: Sequence[Any]) -> Settings | None:
    values = _read("integer", cells)
    if values is None or any(value % 1 for value in values):
        return None
    distinct = sorted({int(value) for value in values})
    if len(distinct) <= FEW and {whole_text(text_of(cell)) for cell in cells} == set(map(str, distinct)):
        return {"kind": "ordinal", "levels": [str(value) for value in distinct]}
    if len(distinct) == len(cells) and (len(cells) > MOST or distinct[-1] - distinct[0] < len(cells)):
        return None  # what numbers records
    return {"kind": "integer", "bounds": [distinct[0], distinct[-1]]}


def _continuous(cells: Sequence[Any]) -> Settings | None:
    values = _read("continuous", cells)
    if values is None or not any(value % 1 for value in values):
        return None
    return {"kind": "continuous", "bounds": [min(values), max(values)]}


def _dates(cells: Sequence[Any]) -> Settings | None:
    values = _read("date", cells)
    if values is None:
        return None
    first, last = (str(_unbounded("date").cell(value)) for value in (min(values), max(values)))
    return {"kind": "date", "first": first, "last": last}


# The first that fits is proposed.
KINDS: tuple[Callable[[Sequence[Any]], Settings | None], ...] = (_whole, _continuous, _dates, _levels)


def _mark(field: str) -> str:
    return "" if field == "kind" else f"  {MARK}"


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
