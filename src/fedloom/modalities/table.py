"""Rows of a table with columns of several kinds, as a schema declares them: ``table/SCHEMA``.

A record is stored as one number for each column (:mod:`fedloom.modalities.schema`), NaN where there is no value.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import ConfigError, DataError
from fedloom.modalities.base import Columns, FromMeans, Modality
from fedloom.modalities.levels import Coding, Levels
from fedloom.modalities.likelihoods import LIKELIHOODS
from fedloom.modalities.schema import Schema

FAMILY = "table"


@cache
def schema_of(modality: str) -> Schema:
    """The schema in the name of a table's modality."""
    family, _, text = modality.partition("/")
    if family != FAMILY or not text:
        raise ConfigError("a table needs a schema, and none is given; 'fedloom data schema FILE' proposes one")
    return Schema.read(text)


def modality_name(schema: Schema) -> str:
    """The name of the modality of tables of that schema."""
    return f"{FAMILY}/{schema.text}"


def read(array: NDArray[Any], name: str) -> Tensor:
    """Rows of numbers as the schema means them, in float64: large whole numbers stay whole."""
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.number):
        raise DataError(f"{name} is {array.dtype} of shape {array.shape}; give numbers of shape (n, columns)")
    return torch.from_numpy(array.astype(np.float64))


def objection(x: Tensor) -> str:
    """Anything else than such rows."""
    if x.dtype != torch.float64 or x.ndim != 2:
        return f"{x.dtype} values; give rows of float64"
    return "infinite values; give numbers, or NaN for no value" if bool(torch.isinf(x).any()) else ""


def encode(x: Tensor) -> NDArray[np.float64]:
    """Numbers in float64, in the memory of the host."""
    values: NDArray[np.float64] = x.double().cpu().numpy()
    return values


def in_columns(x: Tensor, schema: Schema) -> Columns:
    """Cells as a file holds them, by the names of the columns; None where there is no value."""
    rows = encode(x)
    return {
        column.name: np.array([column.cell(value) for value in rows[:, number]], dtype=object)
        for number, column in enumerate(schema.columns)
    }


def from_columns(columns: Columns, schema: Schema) -> NDArray[np.float64]:
    """The way back; all that disagrees with the schema is said at once."""
    found, problems = [], []
    for column in schema.columns:
        values, wrong = column.read(list(columns[column.name]))
        found.append(values)
        problems += wrong
    if problems:
        raise DataError("; ".join(problems))
    return np.stack(found, axis=1)


def made_up(uniform: Tensor, schema: Schema) -> Tensor:
    """Rows of nobody: for each column a code, and a value of it, by one number in [0, 1)."""
    numbers = uniform.double().cpu().numpy()
    codes = np.minimum((numbers * np.array(schema.sizes)).astype(np.int64), np.array(schema.sizes) - 1)
    return torch.from_numpy(schema.values(codes, numbers))


def with_schema(text: str) -> Modality:
    """Tables of one schema."""
    schema = Schema.read(text)
    coding = Coding(schema)
    return replace(
        MODALITY,
        rules=schema.rules,
        plural=f"rows of {len(schema.columns)} columns",
        types={column.name: column.type for column in schema.columns},
        in_columns=partial(in_columns, schema=schema),
        from_columns=partial(from_columns, schema=schema),
        made_up=partial(made_up, schema=schema),
        decode=coding.decode,
        seen=coding.seen,
        coordinates=coding.coordinates,
        drawing=FromMeans(coding.noise, coding.draw),
        likelihoods={"levels": lambda _: Levels(schema.sizes), **LIKELIHOODS},
    )


MODALITY = Modality(
    name=FAMILY,
    plural="rows of a table",
    read=read,
    objection=objection,
    decode=lambda x: x.to(torch.float32),
    encode=encode,
    likelihoods=LIKELIHOODS,
    values="one number a column, as the schema means it",
    metrics=(
        "marginals",
        "column-shapes",
        "pair-trends",
        "table-utility",
        "closest-record",
        "fidelity",
        "cost",
        "likelihood",
    ),
    compares=False,
    with_schema=with_schema,
)
