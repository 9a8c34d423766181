"""Schemas of tables: cells, values, codes, and the ways from one to the other."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import ConfigError
from fedloom.modalities.base import modality_of
from fedloom.modalities.schema import ColumnSettings, Schema, SchemaColumn
from fedloom.modalities.table import modality_name, schema_of
from fedloom.settings import parse
from mixed_rows import rows, schema


def column(**declared: Any) -> SchemaColumn:
    return SchemaColumn.of("c", parse(ColumnSettings, declared))


COLUMNS = {
    "levels": column(kind="categorical", levels=["a", "b", "c"], null=True),
    "order": column(kind="ordinal", levels=["1", "2", "3", "4"]),
    "whole": column(kind="integer", bounds=[-3, 20], bins=5, null=True),
    "edges": column(kind="integer", edges=[0, 1, 1000, 5000]),
    "few": column(kind="integer", bounds=[4, 6]),
    "one": column(kind="integer", bounds=[5, 5]),
    "halves": column(kind="integer", edges=[0.5, 2.5, 3.5]),
    "numbers": column(kind="continuous", bounds=[0.1, 2.5], bins=7, null=True),
    "days": column(kind="date", first="2019-12-31", last="2020-03-01", bins=3, null=True),
}


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(COLUMNS)), seed=st.integers(0, 2**16))
def test_a_value_drawn_of_a_code_has_that_code_and_stays_inside_the_bounds(name: str, seed: int) -> None:
    found, draw = COLUMNS[name], np.random.default_rng(seed)
    codes = draw.integers(0, found.size, 50)
    values = found.values(codes, np.concatenate([draw.random(48), [0.0, 1 - 1e-12]]))
    assert np.array_equal(found.codes(values), codes)
    known = values[~np.isnan(values)]
    assert np.array_equal(np.isnan(values), (codes == found.nothing) & found.null)
    assert np.all((found.least <= known) & (known <= found.largest))
    assert not found.whole or np.all(known % 1 == 0)
    cells = [found.cell(value) for value in values]
    back, problems = found.read(cells)
    assert problems == []
    np.testing.assert_array_equal(back, values)  # NaN is equal to NaN here
    back, problems = found.read(["" if cell is None else str(cell) for cell in cells])  # as CSV has them
    assert problems == []
    np.testing.assert_array_equal(back, values)


def test_all_values_of_a_bin_can_be_drawn() -> None:
    for name, bins in (("whole", 5), ("few", 3), ("edges", 3), ("one", 1)):
        found = COLUMNS[name]
        uniform = (np.arange(200_000) + 0.5) / 200_000
        drawn = [found.values(np.full(200_000, code), uniform) for code in range(bins)]
        wanted = np.arange(found.least, found.largest + 1)
        assert np.array_equal(np.unique(np.concatenate(drawn)), wanted)


@pytest.mark.parametrize(
    ("name", "cells", "values"),
    [
        ("levels", ["a", " b ", "", ".", "NA", None], [0, 1, *[math.nan] * 4]),
        ("order", ["1", 2, 3.0, "4.0"], [0, 1, 2, 3]),
        ("whole", ["7", 7, 7.0, "7.0", float("nan")], [7, 7, 7, 7, math.nan]),
        ("days", ["1970-01-02", datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1, 5), None], None),
    ],
)
def test_cells_of_csv_and_parquet_mean_the_same(name: str, cells: list[Any], values: list[float] | None) -> None:
    found, problems = COLUMNS[name].read(cells)
    if values is None:
        assert found[1] == found[2] == (datetime.date(2020, 1, 1) - datetime.date(1970, 1, 1)).days
        assert problems == ["column 'c' has 1 cells outside [2019-12-31, 2020-03-01]"]
    else:
        np.testing.assert_array_equal(found, np.array(values))
        assert problems == []


def test_what_is_wrong_with_cells_is_counted_and_no_value_is_shown() -> None:
    assert column(kind="integer", bounds=[0, 9]).read(["12", "3.5", "secret", "", "7"])[1] == [
        "column 'c' has 1 empty cells, and null = false",
        "column 'c' has 1 cells that are not a number",
        "column 'c' has 1 cells outside [0, 9]",
        "column 'c' is of whole numbers, and some of its cells are not",
    ]
    assert column(kind="date", first="2020-01-01", last="2020-02-01").read(["5/6/2020", "2020-01-02"])[1] == [
        "column 'c' has 1 cells that are not a date"
    ]
    assert column(kind="categorical", levels=["a"]).read(["secret"])[1] == [
        "column 'c' has 1 cells that are not a level of the schema"
    ]
    assert column(kind="categorical", levels=["a"], other="rest").read(["secret"])[1] == []


def test_a_schema_is_its_text_and_records_come_back_from_columns(tmp_path: Path) -> None:
    found = schema(tmp_path)
    assert Schema.read(found.text) == found
    modality = modality_of(modality_name(found), (len(found.columns),))
    assert modality is modality_of(modality_name(Schema.read(found.text)), (len(found.columns),))
    uniform = np.random.default_rng(1).random((40, len(found.columns)))
    codes = np.random.default_rng(2).integers(0, found.sizes, (40, len(found.columns)))
    values = found.values(codes, uniform)
    x = modality.read(values, "values")
    np.testing.assert_array_equal(modality.restored(modality.columns(x), x.shape[1:]), values)
    assert np.array_equal(found.codes(values), codes)


@pytest.mark.parametrize(
    ("declared", "complaint"),
    [
        ({"kind": "integer"}, r"columns.c needs bounds = \[least, largest\], or edges: they are public, and never"),
        ({"kind": "date"}, r"columns.c needs first and last, or edges"),
        ({"kind": "date", "first": "1/2/20", "last": "2020-01-01"}, r"columns.c.first = '1/2/20' is no date of the fo"),
        ({"kind": "integer", "bounds": [3, 1]}, r"columns.c.edges must rise"),
        ({"kind": "continuous", "edges": [0, 2, 1]}, r"columns.c.edges must rise"),
        ({"kind": "continuous", "edges": list(range(1002))}, r"columns.c has 1001 bins; give at most 999"),
        ({"kind": "categorical"}, r"columns.c.levels has 0 levels; give 1 to 1000"),
        ({"kind": "ordinal", "levels": ["a", "a"]}, r"columns.c.levels names a level twice"),
        ({"kind": "text"}, r"columns.c.kind: unknown value 'text'"),
    ],
)
def test_what_a_column_cannot_be_is_refused(declared: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Schema.of({"columns": {"c": declared}})


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({}, "a schema needs columns; 'fedloom data schema FILE' proposes some"),
        ({"silo": "c", "columns": {"c": {"kind": "ordinal", "levels": ["a"]}}}, "a schema needs a column beside"),
        ({"target": "b", "columns": {"c": {"kind": "ordinal", "levels": ["a"]}}}, "target = 'b' is no column"),
        ({"colums": {}}, "unknown key 'colums'; did you mean 'columns'"),
    ],
)
def test_what_a_schema_cannot_be_is_refused(tree: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Schema.of(tree)


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"columns":[{}]}', '{"columns":[1]}'])
def test_a_name_that_holds_no_schema_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="schema"):
        modality_of(f"table/{text}", (3,))


@pytest.mark.parametrize("name", ["table", "table/", "vector"])
def test_what_needs_a_schema_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match="a table needs a schema, and none is given"):
        schema_of(name)


def test_rows_of_the_helper_keep_to_its_schema(tmp_path: Path) -> None:
    found = schema(tmp_path)
    cells = rows(200)
    read = np.stack([c.read([row[c.name] for row in cells])[0] for c in found.columns], axis=1)
    assert found.broken_rules(read) == []
    assert all(c.read([row[c.name] for row in cells])[1] == [] for c in found.columns)
