"""Tables as Markdown, from declarations and result files alone, put between two marks of a page of a paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean, stdev

from fedloom import templating
from fedloom.errors import ConfigError, RunFolderError
from fedloom.reports.charts import Curve, row_chart
from fedloom.reproduction.figures import FIGURES
from fedloom.reproduction.results import Results, RunResult
from fedloom.reproduction.tables import Column, Part, Row, Table, load_table
from fedloom.runs.files import write_atomically

NOTHING = "-"
DIVERGES = "diverges"


def marks(name: str) -> tuple[str, str]:
    """The lines between which a table stands."""
    return f"<!-- fedloom reproduce {name} -->", f"<!-- end of {name} -->"


def page_of(paper: Path, table: Table) -> Path:
    """The page in a paper's folder that has a place for the table: its README, its appendix, or another beside them."""
    start, end = marks(table.name)
    try:
        for page in sorted(paper.glob("*.md")):
            text = page.read_text(encoding="utf-8")
            if end in text.partition(start)[2]:
                return page
    except OSError as error:
        raise ConfigError(f"cannot read {paper}: {error.strerror}") from error
    if not paper.is_dir():
        raise ConfigError(f"there is no folder {paper}; --papers names the folder of all papers")
    appendix = paper / "appendix.md"
    raise ConfigError(f"{appendix} has no place for '{table.name}': write '{start}' and, below it, '{end}' there")


def render_pages(paper: Path, tables: Sequence[Table]) -> list[Path]:
    """Put tables where their places are in a paper's pages; returns the pages that have changed."""
    results, changed = Results.of_papers(paper.parent), dict[Path, None]()
    for table in tables:
        page, (start, end) = page_of(paper, table), marks(table.name)
        before = page.read_text(encoding="utf-8")
        head, _, rest = before.partition(start)
        text = f"{head}{start}\n\n{render(table, results, paper)}{end}{rest.partition(end)[2]}"
        for path, old, new in ((page, before, text), *_curve(table, results, paper)):
            if new != old:
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, new.encode())
                changed[path] = None
    return list(changed)


def render(table: Table, results: Results, paper: Path) -> str:
    """All parts of a table, and its curve."""
    values = {
        "curve": table.curve,
        "files": [path.relative_to(paper) for path, _, _ in _curve(table, results, paper)],
        "parts": [_part(table, part, results, paper) for part in table.parts],
    }
    return templating.render("reproduction/templates/table.md", values)


def _curve(table: Table, results: Results, paper: Path) -> Iterator[tuple[Path, str, str]]:
    """The file of a table's curve, what it holds and what it should hold; nothing where there is nothing to draw."""
    if not table.curve.column:
        return
    column = table.column(table.curve.column)
    curves = [
        Curve(part.title, {row.name: Line(table, row, results.of(row.identity)).values(column) for row in part.rows})
        for part in table.parts
    ]
    if any(values for curve in curves for values in curve.values.values()):
        path = paper / table.curve.file(table.name)
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        yield path, before, f"{row_chart(curves, table.curve.across, column.title)}\n"


@dataclass(frozen=True)
class RenderedPart:
    """What a page says of a part of a table."""

    title: str
    about: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    orders: Mapping[str, Sequence[str]]  # names of rows by each compared column, the lowest first
    machines: Mapping[str, int]  # how many runs each has measured
    pictures: Mapping[str, Path]


def _part(table: Table, part: Part, results: Results, paper: Path) -> RenderedPart:
    lines = [Line(table, row, results.of(row.identity)) for row in part.rows]
    columns = shown(table, lines)
    ratios = [ratio for ratio in _ratios(table, part, results) if ratio.column in columns]
    titles = (*(column.title for column in columns), *(ratio.title for ratio in ratios))
    done = [result for line in lines for result in line.results]
    usual = next((place for place, _ in Counter(map(_place, done)).most_common(1)), "")
    paths = {f"{figure.shows}: {part.title}": figure.path(paper, part) for figure in FIGURES}
    details = () if table.brief else ("seconds a run", "command")
    return RenderedPart(
        part.title,
        part.about,
        headers=("row", *titles, "seeds", *details),
        rows=[
            (
                line.row.name,
                *(line.cell(column) for column in columns),
                *(ratio.cell(line) for ratio in ratios),
                line.seeds,
                *((line.seconds(usual), line.command) if details else ()),
            )
            for line in lines
        ],
        orders=_orders(table, lines),
        machines=Counter(map(_machine, done)) if details else {},
        pictures={title: path.relative_to(paper) for title, path in paths.items() if path and path.is_file()},
    )


def shown(table: Table, lines: Sequence[Line]) -> list[Column]:
    """The columns of a part: published values only where the paper has one, optional ones where a result has one."""
    needs_one = (c for c in table.columns if c.published or c.optional)
    empty = [column for column in needs_one if not any(line.has(column) for line in lines)]
    return [column for column in table.columns if column not in empty]


@dataclass(frozen=True)
class Line:
    """A row with its results."""

    table: Table
    row: Row
    results: Sequence[RunResult]

    @property
    def seeds(self) -> str:
        """How many repetitions there are."""
        return str(len(self.results)) if self.results else NOTHING

    @property
    def command(self) -> str:
        """What carries the row out."""
        return f"`{self.row.command or f'fedloom reproduce {self.table.name}'}`"

    def seconds(self, usual: str) -> str:
        """Of a run, training and measuring, in the mean; with its devices where those are not the usual ones alone."""
        spent: dict[str, list[float]] = {}
        for result in self.results:
            spent.setdefault(_place(result), []).append(sum(result.seconds.values()))
        means = {place: f"{mean(seconds):.0f}" for place, seconds in spent.items()}
        if list(means) == [usual]:
            return means[usual]
        return "; ".join(f"{seconds} on {place}" for place, seconds in means.items()) or NOTHING

    def has(self, column: Column) -> bool:
        """Whether there is anything to show."""
        return column.published in self.row.published if column.published else bool(self.values(column))

    def values(self, column: Column) -> list[float]:
        """What runs of this row have in a column that is measured."""
        found = (value_of(result, column) for result in self.results if result.state == "finished")
        return [column.scale * value for value in found if value is not None]

    def cell(self, column: Column) -> str:
        """The published value, or mean and standard deviation over seeds."""
        if column.published:
            value = self.row.published.get(column.published, NOTHING)
            return value if isinstance(value, str) else f"{value:.{column.digits}f}"
        values, diverged = self.values(column), sum(result.state == "diverged" for result in self.results)
        if not values:
            return DIVERGES if diverged and diverged == len(self.results) else NOTHING
        spread = f" ± {stdev(values):.{column.digits}f}" if len(values) > 1 else ""
        lost = f" ({diverged} of {len(self.results)} diverged)" if diverged else ""
        return f"{mean(values):.{column.digits}f}{spread}{lost}"

    def number(self, column: Column) -> float | None:
        """The published value or the mean, where there is one."""
        if column.published:
            value = self.row.published.get(column.published)
            return value if isinstance(value, int | float) else None
        values = self.values(column)
        return mean(values) if values else None


@dataclass(frozen=True)
class Ratio:
    """A column over the value of the reference row."""

    column: Column
    reference: Line

    @property
    def title(self) -> str:
        """Of the column that it makes."""
        return f"{self.column.title} over that of {self.reference.row.name}"

    def cell(self, line: Line) -> str:
        """The ratio to the reference row, with two digits."""
        value, whole = line.number(self.column), self.reference.number(self.column)
        return NOTHING if value is None or not whole else f"{value / whole:.2f}"


def _ratios(table: Table, part: Part, results: Results) -> list[Ratio]:
    if not part.reference.row:
        return []
    other = load_table(part.reference.table) if part.reference.table else table
    (row,) = other.chosen([part.reference.row])
    reference = Line(other, row, results.of(row.identity))
    return [Ratio(table.column(title), reference) for title in table.compared]


def _orders(table: Table, lines: Sequence[Line]) -> dict[str, list[str]]:
    """Rows that have both compared values, by each of them."""
    columns = [table.column(title) for title in table.compared]
    both = [line for line in lines if all(line.number(column) is not None for column in columns)]
    if len(both) < 2:
        return {}
    return {column.title: [line.row.name for line in _sorted(both, column)] for column in columns}


def _sorted(lines: Sequence[Line], column: Column) -> list[Line]:
    return sorted(lines, key=lambda line: line.number(column) or 0.0)


def value_of(result: RunResult, column: Column) -> float | None:
    """The metric whose key fits, segment by segment; all are of the same settings, so that only one may.

    Where a column is of a mean, that of all that fit.
    """
    wanted = column.metric.split("/")
    keys = [key for key in result.metrics if len(key.split("/")) == len(wanted)]
    fitting = [key for key in keys if all(map(fnmatchcase, key.split("/"), wanted))]
    if len(fitting) > 1 and not column.mean:
        raise RunFolderError(f"the result of {result.row}, seed {result.seed}, has several {column.metric}: {fitting}")
    return mean(result.metrics[key] for key in fitting) if fitting else None


def _machine(result: RunResult) -> str:
    """Where a run was trained and measured, and with which precision."""
    return ", ".join(filter(None, (_place(result), result.precision, f"torch {result.versions['torch']}")))


def _place(result: RunResult) -> str:
    """The device that a run was measured on, and the one that it was trained on if that is another."""
    elsewhere = result.measured_on and result.measured_on != result.device
    return f"{result.measured_on} (trained on {result.device})" if elsewhere else result.device
