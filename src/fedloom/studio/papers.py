"""The papers' tables: obtained beside published, with links to those runs of the folder that are of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedloom.reports.parts import table, text
from fedloom.reproduction.rendering import Line, shown
from fedloom.reproduction.results import Results
from fedloom.reproduction.tables import Part, Table, load_table, table_names
from fedloom.studio.catalogue import NotServedError
from fedloom.studio.watch import Sight


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


def list_of_tables() -> str:
    """Links to every table, paper by paper."""
    papers: dict[str, list[str]] = {}
    for name in table_names():
        papers.setdefault(name.partition("/")[0], []).append(name)
    return "".join(
        f"<section><h2>{text(paper)}</h2><ul>"
        + "".join(f'<li><a href="/papers/{text(name)}">{text(load_table(name).title)}</a></li>' for name in names)
        + "</ul></section>"
        for paper, names in papers.items()
    )


def parts_of_table(name: str, papers: Path, sights: Iterable[Sight]) -> str:
    """All parts of a table, with what result files under ``papers`` say."""
    found = declared(name)
    results = Results.read(papers / found.table.paper / "results")
    runs: dict[str, list[Sight]] = {}
    for sight in sights:
        for identity in sight.glance.identities:
            runs.setdefault(identity, []).append(sight)
    return "".join(_part(found, part, results, runs) for part in found.table.parts)


def _part(found: Declared, part: Part, results: Results, runs: Mapping[str, list[Sight]]) -> str:
    lines = [Line(found.table, row, results.of(found.identities[row.id])) for row in part.rows]
    columns = shown(found.table, lines)
    rows = [
        (
            text(line.row.name) + _links(runs.get(found.identities[line.row.id], [])),
            *(text(line.cell(column)) for column in columns),
            line.seeds,
            f"<code>{text(line.row.command)}</code>",
        )
        for line in lines
    ]
    headers = ("row", *(column.title for column in columns), "seeds", "command")
    about = f"<p>{text(part.about)}</p>" if part.about else ""
    numbers = tuple(range(1, len(columns) + 2))
    return f'<section class="paper"><h2>{text(part.title)}</h2>{about}{table(headers, rows, right=numbers)}</section>'


def _links(sights: Iterable[Sight]) -> str:
    """Each run of a row on a line of its own, below the row's name."""
    return "".join(
        f'<small><a href="/runs/{entry.key}">{text(entry.name)}</a>, {text(state)}</small>'
        for entry, state in ((sight.glance.entry, sight.state) for sight in sights)
    )
