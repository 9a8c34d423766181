"""What a table of a paper consists of: rows that are presets, columns that are published or measured values.

A table is a TOML file in this package, ``tables/<paper>/<table>.toml``. Every part of it becomes a table of its own.
What the columns of a paper's tables hold stands in one file, ``tables/<paper>/columns.toml``, by their titles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from fedloom.config import Config, EvaluationConfig, load_config
from fedloom.errors import ConfigError, unknown
from fedloom.settings import parse, read_toml

TABLES = Path(__file__).parent / "tables"
COLUMNS = "columns"  # the file beside a paper's tables
ELSEWHERE = "data.path and settings of engine"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A published value by its name, or a measured one by its key, in which ``*`` stands for any part of a segment."""

    title: str = ""
    published: str = ""
    metric: str = ""
    scale: float = 1.0
    digits: int = 2
    optional: bool = False  # left out where no result has it
    mean: bool = False  # of all keys that fit, such as those of several silos


@dataclass(frozen=True, kw_only=True)
class Row:
    """A preset with changes, and what the paper says of it."""

    id: str = ""  # its path within the table, such as mixed-mnist/federated/d
    name: str = ""
    preset: str = ""
    overrides: tuple[str, ...] = ()
    published: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()  # beside those of the table
    pathway: str = ""  # of the samples that heads learn from, if it is not the method's first
    lipschitz: float = 0.0  # of a decoder, where there is no preset: no run, only what theory says

    def config(self, seed: int, more: Sequence[str] = ()) -> Config:
        """The experiment; ``more`` may say where data lie and where it runs, not what is learned."""
        declared = load_config(self.preset, [*self.overrides, f"seed={seed}"])
        if not more:
            return declared
        config = load_config(self.preset, [*self.overrides, f"seed={seed}", *more])
        if identity(replace(config, data=replace(config.data, path=declared.data.path))) != identity(declared):
            raise ConfigError(
                f"{' '.join(more)} would make another experiment of row '{self.id}'; allowed here are {ELSEWHERE}"
            )
        return config

    @property
    def identity(self) -> str:
        """What the row's runs have in common, whatever their seeds, and no other's."""
        return _identity_of(self.preset, self.overrides) if self.preset else f"lipschitz-{self.lipschitz:g}"

    @property
    def command(self) -> str:
        """The command that runs the row, without its seed."""
        return " ".join(("fedloom run", self.preset, *self.overrides)) if self.preset else ""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The row that others are compared with in ratio."""

    table: str = ""
    row: str = ""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A column that is drawn as a curve over the rows of each part."""

    column: str = ""  # its title
    across: str = ""  # what the names of rows are

    def file(self, table: str) -> str:
        """Its place in a paper's folder."""
        return f"figures/{table.partition('/')[2]}.svg"


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows that stand together under one title."""

    title: str = ""
    about: str = ""
    rows: tuple[Row, ...] = ()
    reference: Reference = field(default_factory=Reference)
    # Pictures of all rows, beside the results:
    figure: str = ""  # their samples
    outliers: str = ""  # what the audit drew
    latents: str = ""  # where held-out records lie


@dataclass(frozen=True, kw_only=True)
class Table:
    """Everything about a table but its results."""

    name: str = ""
    title: str = ""
    columns: tuple[Column, ...] = ()
    parts: tuple[Part, ...] = ()
    evaluation: dict[str, Any] = field(default_factory=dict)  # on top of the presets' own
    downstream: bool = False  # heads and mixtures are measured as well
    audit: bool = False  # the exposure of outliers as well, of the first seed: it takes as long as all metrics
    membership: bool = False  # how well training records are told from others as well, of the first seed
    brief: bool = False  # without devices, seconds and commands: for the one screen that says what was found
    compared: tuple[str, ...] = ()  # titles of two columns, published and measured, to be compared in order and ratio
    curve: Drawing = field(default_factory=Drawing)

    @property
    def paper(self) -> str:
        """The name of the paper's folder under papers/."""
        return self.name.partition("/")[0]

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all parts."""
        return tuple(row for part in self.parts for row in part.rows)

    def chosen(self, wanted: Sequence[str]) -> tuple[Row, ...]:
        """Rows as :func:`chosen_rows` has them."""
        return tuple(row for _, row in chosen_rows([self], wanted))

    def settings(self, row: Row, config: Config) -> EvaluationConfig:
        """How a row is measured."""
        mapping = {**asdict(config.evaluation), **self.evaluation}
        mapping["metrics"] = [*mapping["metrics"], *row.metrics]
        return parse(EvaluationConfig, mapping, f"{self.name}: evaluation")

    def stages(self, seed: int) -> list[str]:
        """What is measured of a run beside metrics."""
        of_the_first = {"audit": self.audit, "membership": self.membership} if seed == 0 else {}
        return ["downstream"] * self.downstream + [name for name, asked in of_the_first.items() if asked]

    def column(self, title: str) -> Column:
        """A column by its title."""
        return next(column for column in self.columns if column.title == title)


def chosen_rows(tables: Sequence[Table], wanted: Sequence[str]) -> list[tuple[Table, Row]]:
    """Rows by their ids or the beginning of their ids, each in at least one of the tables; all if nothing is wanted."""
    rows = [(table, row) for table in tables for row in table.rows]
    for name in wanted:
        if not any(_begins(row.id, name) for _, row in rows):
            where = ", ".join(table.name for table in tables)
            raise ConfigError(f"{where}: " + unknown("row", name, dict.fromkeys(row.id for _, row in rows)))
    return [(table, row) for table, row in rows if not wanted or any(_begins(row.id, name) for name in wanted)]


def table_names() -> list[str]:
    """Every table that can be reproduced, such as ``fissionvae/table1``."""
    files = (path.relative_to(TABLES).with_suffix("") for path in TABLES.rglob("*.toml"))
    return sorted(str(file) for file in files if file.name != COLUMNS)


def paper_names() -> list[str]:
    """Every paper that has tables."""
    return list(dict.fromkeys(name.partition("/")[0] for name in table_names()))


def load_table(name: str) -> Table:
    """A table by its name."""
    if name not in table_names():
        raise ConfigError(unknown("table", name, table_names()))
    declared = read_toml(TABLES / f"{name}.toml")
    known = read_toml((TABLES / name).with_name(f"{COLUMNS}.toml"))
    for title in declared["columns"]:
        if title not in known:
            raise ConfigError(f"{name}: " + unknown("column", title, known))
    columns = [{"title": title, **known[title]} for title in declared["columns"]]
    table = parse(Table, {"name": name, **declared, "columns": columns})
    _check(table)
    return table


def identity(config: Config) -> str:
    """What a run is, whatever its seed: a hash of the settings that are not at their defaults.

    Where it runs and how it is measured afterwards do not matter; settings that are added to fedloom later do not
    change it.
    """
    plain = replace(config, seed=0, evaluation=EvaluationConfig())
    settings = plain.to_mapping()
    del settings["name"], settings["engine"], settings["data"]["public"]
    told = _without(settings, Config().to_mapping())
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


@cache
def _identity_of(preset: str, overrides: tuple[str, ...]) -> str:
    """Presets are part of the package, and asked for again and again."""
    return identity(load_config(preset, overrides))


def _without(tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := _without(value, default):
                found[key] = inner
        elif value != default:
            found[key] = value
    return found


def _begins(path: str, beginning: str) -> bool:
    return path == beginning or path.startswith(beginning.rstrip("/") + "/")


def _check(table: Table) -> None:
    """Refuse a declaration that could not be rendered."""
    ids = [row.id for row in table.rows]
    if len(set(ids)) != len(ids) or not all(ids):
        raise ConfigError(f"{table.name}: every row needs an id of its own")
    for column in table.columns:
        if bool(column.published) == bool(column.metric):
            raise ConfigError(f"{table.name}: column '{column.title}' needs either published or metric")
    drawn = (table.curve.column,) if table.curve.column else ()
    for use, titles in (("compared", table.compared), ("curve", drawn)):
        for title in titles:
            if title not in (column.title for column in table.columns):
                known = (column.title for column in table.columns)
                raise ConfigError(f"{table.name}: {use}: " + unknown("column", title, known))
