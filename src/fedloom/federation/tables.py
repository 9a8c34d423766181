"""Tables in CSV or Parquet files, by a schema that lies beside them."""

from __future__ import annotations

import csv
import importlib
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.errors import DataError, FedloomWarning, MissingExtraError
from fedloom.federation import sample
from fedloom.federation.arrays import Examples, assemble
from fedloom.federation.files import existing
from fedloom.federation.records import Dataset
from fedloom.modalities.schema import Schema, is_missing
from fedloom.modalities.table import modality_name, schema_of
from fedloom.settings import read_toml

SCHEMA_FILE = "schema.toml"
HELD_OUT = "test"
Table = dict[str, Sequence[Any]]  # cells by column


@dataclass(frozen=True, eq=False)
class SiloTable:
    """The cells of one silo's file."""

    silo: str
    cells: Table


def load_tables(path: str) -> Dataset:
    """One file for each silo in a folder, or a single file, with ``schema.toml`` beside.

    ::

        data.path/
          schema.toml          columns, bounds, levels: agreed on before anybody looks at records
          hospital-a.csv       a silo; or .parquet
          hospital-b.csv
          test.csv             optional: held-out records; else a tenth of each silo's is held out

    Where the schema names a column ``silo``, that column says whose a record is, whatever the file.
    """
    root = existing(path, "table", "a CSV or Parquet file, or a folder of them, with schema.toml beside")
    folder = root if root.is_dir() else root.parent
    schema = read_schema(folder / SCHEMA_FILE)
    files = sorted(file for file in folder.iterdir() if file.suffix in READERS) if root.is_dir() else [root]
    if not files:
        raise DataError(f"data.path = '{path}' holds no CSV or Parquet file; give one for each silo")
    train = [SiloTable(file.stem, read_table(file)) for file in files if file.stem != HELD_OUT]
    test = [SiloTable("", read_table(file)) for file in files if file.stem == HELD_OUT]
    if not train:
        raise DataError(f"data.path = '{path}' holds a file of held-out records alone; give one for each silo")
    held_out = examples_of(schema, test, several=False) if test else None
    return assemble(root.resolve().stem, examples_of(schema, train, several=len(train) > 1), held_out)


def load_own_table(path: Path, modality: str) -> Dataset:
    """One silo's file, by the schema in the name of its federation's modality; a tenth is held out."""
    schema = schema_of(modality)
    alone = replace(schema, silo="", ignored=(*schema.ignored, schema.silo))
    rows = examples_of(alone, [SiloTable("", read_table(path))], several=False)
    return assemble(path.stem, replace(rows, kind=modality))


@cache
def adult_sample() -> Dataset:
    """4,000 and 1,000 rows of the Adult data set, which lie in the package."""
    schema = Schema.of(read_toml(sample.FOLDER / "adult-schema.toml"))
    parts = [
        examples_of(schema, [SiloTable("", rows_of(sample.verified(name).decode()))], several=False)
        for name in ("adult-train.csv.xz", "adult-test.csv.xz")
    ]
    return assemble("adult-sample", *parts)


def read_schema(path: Path) -> Schema:
    """The schema in a TOML file."""
    if not path.is_file():
        raise DataError(f"{path} is missing: a table needs a schema; 'fedloom data schema FILE' proposes one")
    return Schema.of(read_toml(path))


def examples_of(schema: Schema, tables: Sequence[SiloTable], *, several: bool) -> Examples:
    """Checked records of all silos; whatever disagrees with the schema is said at once."""
    problems, parts, owners, subjects = [], [], [], []
    for table in tables:
        where = f"{table.silo}: " if table.silo else ""
        rows, wrong = _read(schema, table.cells)
        problems += [f"{where}{problem}" for problem in wrong]
        if not wrong and not len(rows):
            problems.append(f"{where}there are no rows")
        if schema.broken == "accepted":
            for sentence in schema.broken_rules(rows):
                warnings.warn(f"{where}{sentence}, which the schema accepts", FedloomWarning, stacklevel=2)
        parts.append(rows)
        owners += [str(cell) for cell in table.cells.get(schema.silo, [])] if schema.silo else [table.silo] * len(rows)
        subjects += [str(cell) for cell in table.cells.get(schema.subject, [])]
    if problems:
        raise DataError("; ".join(problems))
    return Examples(
        torch.from_numpy(np.concatenate(parts)),
        owner=np.array(owners) if several or schema.silo else None,
        subject=np.array(subjects) if schema.subject else None,
        kind=modality_name(schema),
    )


def _read(schema: Schema, cells: Table) -> tuple[np.ndarray[Any, np.dtype[np.float64]], list[str]]:
    aside = {schema.silo, schema.subject, *schema.ignored} - {""}
    wanted = [*schema.names, *(name for name in (schema.silo, schema.subject) if name)]
    problems = [f"column '{name}' of the schema is missing" for name in wanted if name not in cells]
    unknown = [name for name in cells if name not in schema.names and name not in aside]
    problems += [f"column '{name}' is not in the schema: add it, or name it in 'ignored'" for name in unknown]
    found = []
    for column in schema.columns:
        if column.name in cells:
            values, wrong = column.read(cells[column.name])
            if len(values) and np.isnan(values).all():
                wrong = [f"column '{column.name}' is empty throughout"]
            found.append(values)
            problems += wrong
    for name in (schema.silo, schema.subject):
        if empty := sum(is_missing(cell) for cell in cells.get(name, ())):
            problems.append(f"column '{name}' has {empty} empty cells, and says whose a record is")
    if problems:
        return np.empty((0, len(schema.columns))), problems
    values = np.stack(found, axis=1)
    return values, (schema.broken_rules(values) if schema.broken == "refused" else [])


def read_table(path: Path) -> Table:
    """The columns of a file, as its name ends."""
    if path.suffix not in READERS:
        raise DataError(f"{path} is no table; give a file that ends in {' or '.join(READERS)}")
    return READERS[path.suffix](path)


def read_csv(path: Path) -> Table:
    """The columns of a CSV file, all texts."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text, at byte {error.start}: save it as CSV in UTF-8") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return rows_of(text, str(path))


def rows_of(text: str, name: str = "the table") -> Table:
    """The columns of CSV text; the first line names them."""
    rows = list(csv.reader(io.StringIO(text), skipinitialspace=True))
    if not rows:
        raise DataError(f"{name} is empty")
    names = rows[0]
    _require_once(names, name)
    filled = [row for row in rows[1:] if row]
    for number, row in enumerate(filled, start=2):
        if len(row) != len(names):
            raise DataError(f"{name}: row {number} has {len(row)} cells, and there are {len(names)} columns")
    columns = list(zip(*filled, strict=True)) or [()] * len(names)
    return dict(zip(names, columns, strict=True))


def read_parquet(path: Path) -> Table:
    """The columns of a Parquet file, cells as Python values."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError(
            f"{path} needs the package 'pyarrow'; install it with: pip install 'fedloom[release]'"
        ) from error
    try:
        fields = parquet.read_schema(path)
        _require_once(fields.names, str(path))
        if nested := [field.name for field in fields if field.type.num_fields]:
            raise DataError(f"{path}: cells of column '{nested[0]}' are no single values; leave it out of the file")
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own are among them
        raise DataError(f"cannot read {path} as a Parquet file: {error}") from error
    return {name: _cells(table[name]) for name in table.column_names}


def _require_once(names: Sequence[str], where: str) -> None:
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice:
        raise DataError(f"{where} has the column '{twice[0]}' more than once")


def _cells(column: Any) -> Sequence[Any]:
    """Numbers as one array, and of equal texts one for all cells: a million rows are held by any machine."""
    if re.match("u?int|float|double", str(column.type)):
        numbers: Sequence[Any] = column.to_numpy()
        return numbers
    known: dict[Any, Any] = {}
    return [known.setdefault(cell, cell) for chunk in column.chunks for cell in chunk.to_pylist()]


READERS: Mapping[str, Callable[[Path], Table]] = {".csv": read_csv, ".parquet": read_parquet}
