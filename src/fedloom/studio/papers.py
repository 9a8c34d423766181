"""The papers' tables: obtained beside published, with links to those runs of the folder that are of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedloom.reports.figures import Listing
from fedloom.reproduction.rendering import Line, shown
from fedloom.reproduction.results import Results
from fedloom.reproduction.tables import Part, Table, load_table, table_names
from fedloom.studio.catalogue import NotServedError
from fedloom.studio.watch import LiveRun


@dataclass(frozen=True)
class Declared:
    """A table as the package declares it, and what identifies the runs of its rows."""

    table: Table
    identities: Mapping[str, str]  # by the row's id


@cache
def declared(name: str) -> Declared:
    """A table by its name; what it declares never changes."""
    if name not in table_names():
        raise NotServedError("there is no such table; the page of papers lists them")
    found = load_table(name)
    return Declared(found, {row.id: row.identity for row in found.rows})


def tables_by_paper() -> dict[str, dict[str, str]]:
    """The title of every table by its name, paper by paper."""
    papers: dict[str, dict[str, str]] = {}
    for name in table_names():
        papers.setdefault(name.partition("/")[0], {})[name] = load_table(name).title
    return papers


@dataclass(frozen=True)
class RowName:
    """A row, and those runs of the folder that are of it."""

    name: str
    live_runs: Sequence[LiveRun]


@dataclass(frozen=True)
class ShownPart:
    """A part of a table: names of rows at the left, commands at the right."""

    title: str
    about: str
    table: Listing


def parts_of_table(name: str, papers: Path, live_runs: Iterable[LiveRun]) -> list[ShownPart]:
    """All parts of a table, with what result files under ``papers`` say."""
    found = declared(name)
    results = Results.of_papers(papers)
    runs: dict[str, list[LiveRun]] = {}
    for live_run in live_runs:
        for identity in live_run.summary.identities:
            runs.setdefault(identity, []).append(live_run)
    return [_part(found, part, results, runs) for part in found.table.parts]


def _part(found: Declared, part: Part, results: Results, runs: Mapping[str, list[LiveRun]]) -> ShownPart:
    lines = [Line(found.table, row, results.of(found.identities[row.id])) for row in part.rows]
    columns = shown(found.table, lines)
    rows = [
        (
            RowName(line.row.name, runs.get(found.identities[line.row.id], [])),
            *(line.cell(column) for column in columns),
            line.seeds,
            line.row.command,
        )
        for line in lines
    ]
    headers = ("row", *(column.title for column in columns), "seeds", "command")
    return ShownPart(part.title, part.about, Listing(headers, rows, right=range(1, len(columns) + 2)))
