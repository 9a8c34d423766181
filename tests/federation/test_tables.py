"""Tables in files: silos, subjects, and one sentence for whatever does not fit."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from fedloom.config import DataConfig
from fedloom.deployment.charter import Charter, load_records
from fedloom.errors import ConfigError, DataError, FedloomWarning
from fedloom.federation.building import build_federation
from fedloom.federation.parquet import load_parquet
from fedloom.federation.sources import SOURCES
from fedloom.federation.tables import load_own_table, load_tables
from fedloom.modalities.table import modality_name, schema_of
from fedloom.release.formats import CsvWriter, ParquetWriter, RecordKind
from fedloom.streams import Streams
from mixed_rows import SCHEMA, rows, schema, schema_file, write_rows

Cells = dict[str, str]


def test_files_are_silos_and_a_tenth_of_each_is_held_out(tmp_path: Path) -> None:
    schema_file(tmp_path)
    for seed, name in enumerate(("east", "west")):
        write_rows(tmp_path / f"{name}.csv", rows(40 * (seed + 1), seed))
    federation = build_federation(DataConfig(source="table", path=str(tmp_path)), Streams(0))
    assert {silo.name: len(silo) for silo in federation.silos} == {"east": 36, "west": 72}
    assert len(federation.test) == 12
    assert federation.shape == (8,)
    assert federation.silos[0].train.x.dtype == torch.float64
    write_rows(tmp_path / "test.csv", rows(7, 9))
    federation = build_federation(DataConfig(source="table", path=str(tmp_path)), Streams(0))
    assert {silo.name: len(silo) for silo in federation.silos} == {"east": 40, "west": 80}
    assert len(federation.test) == 7


def test_a_column_says_whose_a_row_is_and_is_not_learned(tmp_path: Path) -> None:
    schema_file(tmp_path, 'silo = "ward"\n' + SCHEMA)
    found = rows(60)
    dataset = load_tables(str(write_rows(tmp_path / "all.csv", found)))
    assert dataset.owners == ("attic", "north", "south")
    assert dataset.owner is not None
    assert dataset.train.shape == (7,)
    kept = torch.bincount(dataset.owner)
    held_out = torch.bincount(dataset.test.home) if dataset.test.home is not None else 0
    assert (kept + held_out).tolist() == [sum(row["ward"] == name for row in found) for name in dataset.owners]
    assert dataset.train.subject is not None
    assert len(torch.unique(torch.cat([dataset.train.subject, dataset.test.subject]))) == 30  # type: ignore[list-item]


def test_csv_and_parquet_hold_the_same(tmp_path: Path) -> None:
    schema_file(tmp_path)
    found = rows(50)
    write_rows(tmp_path / "a.csv", found)
    table: dict[str, list[object]] = {name: [row[name] or None for row in found] for name in found[0]}
    table["age"] = [int(row["age"]) for row in found]
    table["weight"] = [float(row["weight"]) if row["weight"] else None for row in found]
    parquet = pyarrow.table(table)
    days = parquet.schema.get_field_index("admitted")
    parquet = parquet.set_column(days, "admitted", parquet["admitted"].cast(pyarrow.date32()))
    pyarrow.parquet.write_table(parquet, tmp_path / "a.parquet")
    csv, other = (load_tables(str(tmp_path / f"a.{ending}")) for ending in ("csv", "parquet"))
    np.testing.assert_array_equal(csv.train.x.numpy(), other.train.x.numpy())


def broken(found: list[Cells], column: str, value: str) -> list[Cells]:
    return [{**found[0], column: value}, *found[1:]]


@pytest.mark.parametrize(
    ("column", "value", "complaint"),
    [
        ("pain", "agony", "column 'pain' has 1 cells that are not a level of the schema"),
        ("age", "130", "column 'age' has 1 cells outside [0, 99]"),
        ("age", "", "column 'age' has 1 empty cells, and null = false"),
        ("age", "7.5", "column 'age' is of whole numbers, and some of its cells are not"),
        ("weight", "heavy", "column 'weight' has 1 cells that are not a number"),
        ("weight", "inf", "column 'weight' has 1 cells outside [0.5, 200.0]"),
        ("admitted", "yesterday", "column 'admitted' has 1 cells that are not a date"),
        ("discharged", "2020-01-00", "column 'discharged' has 1 cells that are not a date"),
        ("subject", "", "column 'subject' has 1 empty cells, and says whose a record is"),
    ],
)
def test_what_does_not_fit_is_counted_and_not_shown(tmp_path: Path, column: str, value: str, complaint: str) -> None:
    schema_file(tmp_path)
    file = write_rows(tmp_path / "ward.csv", broken(rows(20), column, value))
    with pytest.raises(DataError) as caught:
        load_tables(str(file))
    assert str(caught.value) == f"ward: {complaint}"


def test_all_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    text = SCHEMA.replace('ignored = ["note"]', "") + '\n[columns.height]\nkind = "integer"\nbounds = [0, 9]\n'
    schema_file(tmp_path, text)
    write_rows(tmp_path / "a.csv", [{**row, "discharged": "", "age": "-1"} for row in rows(20)])
    write_rows(tmp_path / "b.csv", [])
    with pytest.raises(DataError) as caught:
        load_tables(str(tmp_path))
    missing, unknown = ("column 'height' of the schema is missing", "column 'note' is not in the schema: add it, or")
    said = str(caught.value).split("; ")
    assert [sentence.partition(" name it")[0] for sentence in said] == [
        f"a: {missing}",
        f"a: {unknown}",
        "a: column 'discharged' is empty throughout",
        "a: column 'age' has 20 cells outside [0, 99]",
        f"b: {missing}",
        f"b: {unknown}",
    ]


def test_a_silo_without_rows_is_named(tmp_path: Path) -> None:
    schema_file(tmp_path)
    write_rows(tmp_path / "a.csv", rows(20))
    write_rows(tmp_path / "b.csv", [])
    with pytest.raises(DataError, match=r"^b: there are no rows$"):
        load_tables(str(tmp_path))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", r"wards.csv is empty"),
        (b"a,b,a\n1,2,3\n", r"wards.csv has the column 'a' more than once"),
        (b"a,b\n1,2\n1\n", r"wards.csv: row 3 has 1 cells, and there are 2 columns"),
        ("ward\nMünchen\n".encode("latin-1"), r"wards.csv is not UTF-8 text, at byte 6: save it as CSV in UTF-8"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, data: bytes, complaint: str) -> None:
    schema_file(tmp_path)
    (tmp_path / "wards.csv").write_bytes(data)
    with pytest.raises(DataError, match=complaint):
        load_tables(str(tmp_path))


@pytest.mark.parametrize(
    ("columns", "names", "complaint"),
    [
        ([["x"], [1], [2]], ["a", "b", "b"], r"wards.parquet has the column 'b' more than once"),
        ([["x"], [[1, 2]]], ["a", "b"], r"cells of column 'b' are no single values; leave it out of the file"),
    ],
)
def test_a_parquet_file_that_is_no_table_is_refused(
    tmp_path: Path, columns: list[list[object]], names: list[str], complaint: str
) -> None:
    schema_file(tmp_path)
    table = pyarrow.Table.from_arrays([pyarrow.array(cells) for cells in columns], names=names)
    pyarrow.parquet.write_table(table, tmp_path / "wards.parquet")
    with pytest.raises(DataError, match=complaint):
        load_tables(str(tmp_path))


def test_a_parquet_file_gives_what_a_csv_file_of_the_same_cells_does(tmp_path: Path) -> None:
    """Numbers come as arrays, with gaps or without; a level may be a number, and a number outside is refused."""
    schema_file(
        tmp_path,
        """
        columns.age = {kind = "integer", bounds = [0, 99], null = true}
        columns.weight = {kind = "continuous", bounds = [0, 200]}
        columns.grade = {kind = "ordinal", levels = ["1", "2", "3"]}
        columns.day = {kind = "date", first = "2024-01-01", last = "2024-12-31"}
        """,
    )
    cells = {
        "age": [30, None, 7] * 10,
        "weight": [70.5, 80.0, 61.25] * 10,
        "grade": [1, 2, 3] * 10,
        "day": [datetime.date(2024, 5, day) for day in range(1, 31)],
    }
    pyarrow.parquet.write_table(pyarrow.table(cells), tmp_path / "a.parquet")
    texts = zip(*([("" if cell is None else str(cell)) for cell in column] for column in cells.values()), strict=True)
    text = "\n".join([",".join(cells), *map(",".join, texts)])
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    one, other = (load_tables(str(tmp_path / name)).train.x for name in ("a.parquet", "a.csv"))
    np.testing.assert_array_equal(one.numpy(), other.numpy())
    pyarrow.parquet.write_table(pyarrow.table(cells | {"weight": [float("inf")] * 30}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'weight' has 30 cells outside \[0.0, 200.0\]"):
        load_tables(str(tmp_path / "a.parquet"))


def test_what_is_missing_around_the_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"schema.toml is missing: a table needs a schema; 'fedloom data schema FILE'"):
        load_tables(str(tmp_path))
    schema_file(tmp_path)
    with pytest.raises(DataError, match=r"holds no CSV or Parquet file; give one for each silo"):
        load_tables(str(tmp_path))
    write_rows(tmp_path / "test.csv", rows(20))
    with pytest.raises(DataError, match=r"holds a file of held-out records alone"):
        load_tables(str(tmp_path))
    (tmp_path / "rows.txt").write_text("a\n1\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"rows.txt is no table; give a file that ends in .csv or .parquet"):
        load_tables(str(tmp_path / "rows.txt"))


def test_records_that_break_a_rule_are_refused_unless_the_schema_accepts_them(tmp_path: Path) -> None:
    schema_file(tmp_path)
    found = [{**row, "pregnant": "no"} for row in rows(20)]
    men = sum(row["sex"] == "male" for row in found)
    file = write_rows(tmp_path / "a.csv", found)
    sentence = f"^a: {men} of 20 records break the rule 'if sex is male then pregnant is null'"
    with pytest.raises(DataError, match=f"{sentence}$"):
        load_tables(str(file))
    schema_file(tmp_path, 'broken = "accepted"\n' + SCHEMA)
    with pytest.warns(FedloomWarning, match=f"{sentence}, which the schema accepts$"):
        assert len(load_tables(str(file)).train) == 18


def test_a_silo_brings_its_file_by_the_charter_s_schema(tmp_path: Path) -> None:
    modality = modality_name(schema(tmp_path, 'silo = "ward"\n' + SCHEMA))
    file = write_rows(tmp_path / "own.csv", rows(30))
    charter = Charter(name="wards", address="localhost:1", silos={"a": "all"}, shape=(7,), modality=modality)
    federation = charter.at_a_silo("a", load_records(file, modality=modality))
    assert federation.silos[0].train.modality.name == modality
    assert (len(federation.silos[0]), len(federation.test)) == (27, 3)
    with pytest.raises(ConfigError, match="a table needs a schema, and none is given"):
        load_own_table(file, "vector")
    other = modality_name(schema(tmp_path))
    with pytest.raises(DataError, match=r"'own' holds rows of 8 columns, the charter says rows of 7 columns"):
        charter.at_a_silo("a", load_own_table(file, other))


def test_released_rows_have_types_and_come_back(tmp_path: Path) -> None:
    schema_file(tmp_path)
    x = load_tables(str(write_rows(tmp_path / "a.csv", rows(60)))).train
    assert bool(torch.isnan(x.x).any())
    kind = RecordKind(x.shape, ("all",), (), x.kind)
    for make in (ParquetWriter, CsvWriter):
        (tmp_path / make.__name__).mkdir()
        writer = make(tmp_path / make.__name__, kind)
        writer.add(x.x[:30], "all", "")
        writer.add(x.x[30:], "all", "")
        writer.close()
    (file,) = (tmp_path / "ParquetWriter" / "data").glob("*.parquet")
    types = {field.name: str(field.type) for field in pyarrow.parquet.read_schema(file)}
    assert types == {
        "ward": "string",
        "admitted": "date32[day]",
        "discharged": "date32[day]",
        "age": "int64",
        "weight": "double",
        "pain": "string",
        "sex": "string",
        "pregnant": "string",
    }
    back = load_parquet(str(file))
    assert sorted(rows_in(back.train.x) + rows_in(back.test.x)) == sorted(rows_in(x.x))
    found = schema_of(x.kind)
    plain = SCHEMA.replace('subject = "subject"\nignored = ["note"]\n', "")
    schema_file(tmp_path / "CsvWriter" / "data", plain)
    back = load_tables(str(tmp_path / "CsvWriter" / "data" / "train.csv"))
    assert sorted(rows_in(back.train.x) + rows_in(back.test.x)) == sorted(rows_in(x.x))
    assert found.columns == schema_of(back.train.kind).columns


def rows_in(x: torch.Tensor) -> list[str]:
    """As texts, of which NaN is like any other."""
    return [str(row) for row in x.tolist()]


@pytest.mark.parametrize("groups", [("all",), ("ct", "mri")])
def test_a_table_says_whose_a_row_is_only_where_there_are_several(tmp_path: Path, groups: tuple[str, ...]) -> None:
    schema_file(tmp_path)
    x = load_tables(str(write_rows(tmp_path / "a.csv", rows(20)))).train
    writer = CsvWriter(tmp_path, RecordKind(x.shape, groups, (), x.kind))
    writer.add(x.x[:1], groups[0], "")
    writer.close()
    header, row = (tmp_path / "data" / "train.csv").read_text(encoding="utf-8").splitlines()
    assert header.endswith(",group") == row.endswith(f",{groups[0]}") == (len(groups) > 1)


def test_what_has_no_cells_is_refused_as_csv(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--format csv holds single cells, and images have none; use parquet or npz"):
        CsvWriter(tmp_path, RecordKind((1, 4, 4), ("all",), ()))
    assert not any(tmp_path.iterdir())


def test_the_embedded_rows_are_those_of_a_census(tmp_path: Path) -> None:
    dataset = SOURCES["adult-sample"].load("")
    assert (len(dataset.train), len(dataset.test), dataset.train.shape) == (4000, 1000, (13,))
    found = schema_of(dataset.train.kind)
    first = {name: column[0] for name, column in dataset.train.modality.columns(dataset.train.x[:1]).items()}
    assert set(first) == set(found.names)
    assert found.target == "income-per-year"
    assert schema(tmp_path) != found
