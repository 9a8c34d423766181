"""Records in the columns of a Parquet file, which says of what modality they are."""

from __future__ import annotations

import importlib
import io
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedloom.errors import DataError, FedloomError, MissingExtraError
from fedloom.federation.arrays import Examples, assemble
from fedloom.federation.files import existing
from fedloom.federation.records import Dataset
from fedloom.modalities.base import modality_of

GROUP, LABEL = "group", "label"  # whose a record is; all other columns are the record


def load_parquet(path: str) -> Dataset:
    """A file that ``fedloom synthesize --format parquet`` wrote; a tenth of its records is held out."""
    file = existing(path, "parquet", "a .parquet file")
    try:
        pyarrow = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError(
            "data.source = 'parquet' needs the package 'pyarrow'; install it with: pip install 'fedloom[release]'"
        ) from error
    try:
        table = pyarrow.read_table(file)
        told = {key: json.loads(text) for key, text in (table.schema.metadata or {}).items()}
        schema, features = told[b"fedloom"], told[b"huggingface"]["info"]["features"]
        kind, shape = str(schema["modality"]), tuple(schema["shape"])
        modality = modality_of(kind, shape)
        types = {**schema["columns"], **dict.fromkeys(modality.types, "object")}
        columns = {name: _values(table[name].to_pylist(), types.get(name)) for name in table.column_names}
        named = {
            name: np.array(features[name]["names"])[columns.pop(name)] for name in (GROUP, LABEL) if name in columns
        }
        x = modality.read(modality.restored(columns, shape), str(file))
    except KeyError as error:
        raise DataError(
            f"{file} does not say what its records are; 'fedloom synthesize --format parquet' writes files that do"
        ) from error
    except FedloomError:
        raise
    except (OSError, ValueError, TypeError, IndexError) as error:  # pyarrow's own are among them
        raise DataError(f"cannot read {file} as a Parquet file: {error}") from error
    return assemble(file.stem, Examples(x, y=named.get(LABEL), group=named.get(GROUP), kind=kind))


def _values(column: list[Any], dtype: str | None) -> NDArray[Any]:
    """Numbers, texts and lists of numbers as they are; pictures, which are PNG files, as pixels."""
    if not column or not isinstance(column[0], dict):
        return np.array(column, dtype)
    pictures = [np.asarray(Image.open(io.BytesIO(each["bytes"]), formats=("PNG",))) for each in column]
    return np.stack([np.atleast_3d(pixels) for pixels in pictures])
