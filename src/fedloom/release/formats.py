"""How synthetic records are written: as a folder of images, as an .npz file, or as a table in Parquet or CSV."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedloom.errors import ConfigError, MissingExtraError
from fedloom.modalities.base import Columns, Modality, modality_of
from fedloom.release.release_folder import file_names


@dataclass(frozen=True)
class RecordKind:
    """What all records of a data set have in common."""

    shape: tuple[int, ...]
    groups: tuple[str, ...]
    classes: tuple[str, ...]  # empty where records have no label
    name: str = ""  # of its modality; "": that which its shape speaks for

    @property
    def modality(self) -> Modality:
        """All that depends on it."""
        return modality_of(self.name, self.shape)

    @property
    def columns(self) -> Columns:
        """The columns of a table of one record of nothing, which say what columns hold."""
        return self.modality.columns(torch.zeros(1, *self.shape))

    @property
    def owners(self) -> dict[str, tuple[str, ...]]:
        """The columns that say whose a record is, and what each may say; a table of one group needs no such column."""
        one = len(self.groups) == 1 and self.modality.types
        found = ({} if one else {"group": self.groups}) | ({"label": self.classes} if self.classes else {})
        if taken := set(self.columns) & set(found):
            raise ConfigError(f"{self.modality.plural} have a column '{min(taken)}', which says whose a record is")
        return found


class Writer(Protocol):
    """Takes records as they are made."""

    def add(self, x: Tensor, group: str, label: str) -> None:
        """Some records of one group and class; the label is empty where there is none."""
        ...

    def close(self) -> None:
        """Finish the files: all records have come."""
        ...


def _png(pixels: NDArray[Any]) -> bytes:
    """One picture, (height, width, 1 or 3), without loss."""
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _is_pictures(column: NDArray[Any]) -> bool:
    return column.ndim == 4


class FolderWriter:
    """``data/<group>/<class>/<number>.png``, and ``data/metadata.jsonl`` with the names as they are."""

    def __init__(self, folder: Path, kind: RecordKind) -> None:
        if [*map(_is_pictures, kind.columns.values())] != [True]:
            raise ConfigError(
                f"--format folder holds images of 1 or 3 channels, and these {kind.modality.plural} have shape "
                f"{kind.shape}; use npz, parquet or csv"
            )
        self._kind, self._data, self._count = kind, folder / "data", 0
        self._groups, self._classes = file_names(kind.groups), file_names(kind.classes)
        self._data.mkdir()
        self._metadata = (self._data / "metadata.jsonl").open("w", encoding="utf-8")

    def add(self, x: Tensor, group: str, label: str) -> None:
        """Files, and a line for each."""
        place = self._data / self._groups[group] / (self._classes[label] if label else "")
        place.mkdir(parents=True, exist_ok=True)
        (pictures,) = self._kind.modality.columns(x).values()
        for pixels in pictures:
            file = place / f"{self._count:06d}.png"
            file.write_bytes(_png(pixels))
            row = {"file_name": file.relative_to(self._data).as_posix(), "group": group}
            self._metadata.write(json.dumps(row | ({"label": label} if label else {}), ensure_ascii=False) + "\n")
            self._count += 1

    def close(self) -> None:
        """Close the table of records, whose lines are whole already."""
        self._metadata.close()


class NpzWriter:
    """``data.npz``: ``x_train``, ``group_train`` and, with labels, ``y_train``, as ``data.source = "npz"`` reads it."""

    def __init__(self, folder: Path, kind: RecordKind, name: str = "data.npz") -> None:
        self._file, self._kind = folder / name, kind
        self._x: list[NDArray[Any]] = []
        self._groups: list[str] = []
        self._labels: list[str] = []

    def add(self, x: Tensor, group: str, label: str) -> None:
        """Keep the records in memory until all have come."""
        self._x.append(self._kind.modality.encode(x))
        self._groups += [group] * len(x)
        self._labels += [label] * len(x)

    def close(self) -> None:
        """Write all records into one .npz file."""
        arrays = {"x_train": np.concatenate(self._x), "group_train": np.array(self._groups)}
        arrays["modality"] = np.array(self._kind.modality.name)
        if self._kind.classes:
            arrays["y_train"] = np.array(self._labels)
        with self._file.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


class ParquetWriter:
    """One Parquet file whose columns Hugging Face ``datasets`` knows: images as PNG, names as class labels."""

    def __init__(self, folder: Path, kind: RecordKind) -> None:
        self._kind, self._arrow = kind, _pyarrow()
        pa = self._arrow
        names, values, types = kind.owners, kind.columns, kind.modality.types
        self._numbers = {column: {name: number for number, name in enumerate(of)} for column, of in names.items()}
        columns = [(name, _arrow_type(pa, column, types.get(name, ""))) for name, column in values.items()]
        features = {name: _feature(column, types.get(name, "")) for name, column in values.items()}
        features |= {column: {"names": list(of), "_type": "ClassLabel"} for column, of in names.items()}
        told = {
            "huggingface": json.dumps({"info": {"features": features}}),
            "fedloom": json.dumps(kind.modality.schema(kind.shape)),
        }
        self._schema = pa.schema([*columns, *((column, pa.int64()) for column in names)], metadata=told)
        (folder / "data").mkdir()
        path = folder / "data" / "train-00000-of-00001.parquet"
        self._file = importlib.import_module("pyarrow.parquet").ParquetWriter(path, self._schema)

    def add(self, x: Tensor, group: str, label: str) -> None:
        """Write the records as a row group of the Parquet file."""
        table = {name: _rows(column) for name, column in self._kind.modality.columns(x).items()}
        for column, name in (("group", group), ("label", label)):
            if column in self._numbers:
                table[column] = [self._numbers[column][name]] * len(x)
        self._file.write_table(self._arrow.table(table, schema=self._schema))

    def close(self) -> None:
        """Write the footer, without which nobody can read the file."""
        self._file.close()


class CsvWriter:
    """``data/train.csv``: a line for each record, its cells as people read them; empty where there is no value."""

    def __init__(self, folder: Path, kind: RecordKind) -> None:
        if kind.modality.tiles(torch.zeros(1, *kind.shape)) is not None or not kind.modality.shows(kind.shape):
            raise ConfigError(
                f"--format csv holds single cells, and {kind.modality.plural} have none; use parquet or npz"
            )
        self._modality, self._owners = kind.modality, tuple(kind.owners)
        names = (*kind.columns, *self._owners)
        (folder / "data").mkdir()
        self._file = (folder / "data" / "train.csv").open("w", encoding="utf-8", newline="")
        self._lines = csv.writer(self._file, lineterminator="\n")
        self._lines.writerow(names)

    def add(self, x: Tensor, group: str, label: str) -> None:
        """Write the records as lines."""
        whose = [name for column, name in (("group", group), ("label", label)) if column in self._owners]
        cells = [column.tolist() for column in self._modality.columns(x).values()]
        self._lines.writerows((*row, *whose) for row in zip(*cells, strict=True))

    def close(self) -> None:
        """Close the file, whose lines are whole already."""
        self._file.close()


def _arrow_type(arrow: ModuleType, column: NDArray[Any], named: str) -> Any:
    """What Parquet calls the values of a column, which its modality may have named."""
    if named:
        return arrow.type_for_alias(named)
    if _is_pictures(column):
        return arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    of_one = arrow.string() if column.dtype.kind == "U" else arrow.from_numpy_dtype(column.dtype)
    return of_one if column.ndim == 1 else arrow.list_(of_one, column.shape[1])


def _feature(column: NDArray[Any], named: str) -> dict[str, Any]:
    """What Hugging Face calls the values of a column."""
    if named:
        return {"dtype": named, "_type": "Value"}
    if _is_pictures(column):
        return {"_type": "Image"}
    of_one = {"dtype": "string" if column.dtype.kind == "U" else str(column.dtype), "_type": "Value"}
    return of_one if column.ndim == 1 else {"feature": of_one, "length": column.shape[1], "_type": "List"}


def _rows(column: NDArray[Any]) -> list[Any]:
    return [{"bytes": _png(each), "path": None} for each in column] if _is_pictures(column) else column.tolist()


FORMATS: dict[str, Callable[[Path, RecordKind], Writer]] = {
    "folder": FolderWriter,
    "npz": NpzWriter,
    "parquet": ParquetWriter,
    "csv": CsvWriter,
}
# Where Hugging Face finds the records; it reads no npz.
DATA_FILES = {"folder": "data/**", "parquet": "data/*.parquet", "csv": "data/*.csv"}


def _pyarrow() -> ModuleType:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise MissingExtraError(
            "--format parquet needs the package 'pyarrow'; install it with: pip install 'fedloom[release]'"
        ) from error
