"""Proposed schemas: kinds by content, marks on what was read off records, and who is left out."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedloom.errors import DataError
from fedloom.federation.schema_proposal import MARK, proposed_schema
from fedloom.federation.tables import load_tables
from mixed_rows import rows, write_rows


@pytest.mark.parametrize(
    ("name", "cells", "settings"),
    [
        ("dose", ["1", "2", "2.0", ""], {"kind": "ordinal", "levels": ["1", "2"], "null": True}),
        ("age", [str(20 + n % 50) for n in range(80)], {"kind": "integer", "bounds": [20, 69]}),
        ("bmi", ["20.5", "31", "."], {"kind": "continuous", "bounds": [20.5, 31.0], "null": True}),
        ("day", ["2020-03-01", "2019-01-31"], {"kind": "date", "first": "2019-01-31", "last": "2020-03-01"}),
        ("arm", ["b", " a", "b"], {"kind": "categorical", "levels": ["a", "b"]}),
        ("middle", ["x", "y"], {"kind": "categorical", "levels": ["x", "y"]}),  # no "id" as a word of its own
        ("when", ["01/02/2020", "03/02/2020"], {"kind": "categorical", "levels": ["01/02/2020", "03/02/2020"]}),
        ("nothing", ["", "NA"], "empty throughout"),
        ("text", [f"free text {n}" for n in range(30)], "free text"),
        ("letter", ["so much to say " * 5, "b"], "free text"),
        ("row", [str(n) for n in range(30)], "free text"),
        ("code", [str(n * n) for n in range(150)], "free text"),
        *((name, ["a", "b"], "by its name") for name in ("patient_id", "SSN", "lastName", "E-mail", "home.address")),
        *((name, ["a", "b"], "by its name") for name in ("MRN", "PID", "Patient", "phone2", "zip", "clinic_name")),
    ],
)
def test_a_column_is_what_its_cells_are_unless_its_name_says_who_somebody_is(
    tmp_path: Path, name: str, cells: list[str], settings: dict[str, object] | str
) -> None:
    file = tmp_path / "a.csv"
    file.write_text("\n".join([f'"{name}",beside', *(f'"{cell}",x' for cell in cells)]) + "\n", encoding="utf-8")
    text = proposed_schema([file])
    tree = tomllib.loads(text)
    if isinstance(settings, str):
        assert tree["ignored"] == [name]
        assert f'"{name}",  # {settings}' in text
    else:
        assert tree["columns"][name] == settings


def test_each_line_that_came_from_records_is_marked_and_the_file_fits_its_records(tmp_path: Path) -> None:
    found = rows(120)
    files = [write_rows(tmp_path / f"{name}.csv", found[part::2]) for part, name in enumerate("ab")]
    text = proposed_schema(files)
    for line in text.split("\n\n", 1)[1].splitlines():
        told = line.startswith(("levels", "bounds", "first", "last", "null"))
        assert line.endswith(MARK) == told
        assert told or line.startswith(("[", "]", "kind", "ignored", "    ")) or not line
    (tmp_path / "schema.toml").write_text(text, encoding="utf-8")
    assert tomllib.loads(text)["ignored"] == ["subject", "note"]
    dataset = load_tables(str(tmp_path))
    assert len(dataset.train) + len(dataset.test) == 120


def test_files_of_different_columns_or_without_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n", encoding="utf-8")
    (tmp_path / "b.csv").write_text("x,z\n1,2\n", encoding="utf-8")
    (tmp_path / "c.csv").write_text("x,z\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"b.csv and .*a.csv differ in the columns y, z; give files of one kind"):
        proposed_schema([tmp_path / "a.csv", tmp_path / "b.csv"])
    with pytest.raises(DataError, match=r"c.csv holds no rows to propose a schema from"):
        proposed_schema([tmp_path / "c.csv"])
