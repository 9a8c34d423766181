"""How synthetic records are written: as a folder of images, as an .npz file, or as a table in Parquet."""

from __future__ import annotations

import importlib
import io
import json
import math
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
from fedloom.modalities.base import Modality, modality_of
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
    def fits_png(self) -> bool:
        """Whether it is an image that can be seen."""
        return self.modality.is_picture and self.modality.shows(self.shape)

    def numbers(self, x: Tensor) -> NDArray[Any]:
        """As a table holds them: as they are stored, but pixels that are no PNG file as precise as they were made."""
        return x.float().cpu().numpy() if self.modality.is_picture else self.modality.encode(x)


class Writer(Protocol):
    """Takes records as they are made."""

    def add(self, x: Tensor, group: str, label: str) -> None:
        """Some records of one group and class; the label is empty where there is none."""
        ...

    def close(self) -> None:
        """Finish the files: all records have come."""
        ...


def _png(pixels: NDArray[Any]) -> bytes:
    """One image, (channels, height, width), without loss."""
    buffer = io.BytesIO()
    Image.fromarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, 2)).save(buffer, format="PNG")
    return buffer.getvalue()


class FolderWriter:
    """``data/<group>/<class>/<number>.png``, and ``data/metadata.jsonl`` with the names as they are."""

    def __init__(self, folder: Path, kind: RecordKind) -> None:
        if not kind.fits_png:
            raise ConfigError(
                f"--format folder holds images of 1 or 3 channels, and these records have shape {kind.shape}; use npz "
                "or parquet"
            )
        self._kind, self._data, self._count = kind, folder / "data", 0
        self._groups, self._classes = file_names(kind.groups), file_names(kind.classes)
        self._data.mkdir()
        self._metadata = (self._data / "metadata.jsonl").open("w", encoding="utf-8")

    def add(self, x: Tensor, group: str, label: str) -> None:
        """Files, and a line for each."""
        place = self._data / self._groups[group] / (self._classes[label] if label else "")
        place.mkdir(parents=True, exist_ok=True)
        for pixels in self._kind.modality.encode(x):
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

    def __init__(self, folder: Path, kind: RecordKind) -> None:
        self._folder, self._kind = folder, kind
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
        with (self._folder / "data.npz").open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


class ParquetWriter:
    """One Parquet file whose columns Hugging Face ``datasets`` knows: images as PNG, names as class labels."""

    def __init__(self, folder: Path, kind: RecordKind) -> None:
        self._kind, self._arrow = kind, _pyarrow()
        pa, length = self._arrow, math.prod(kind.shape)
        names = {"group": kind.groups} | ({"label": kind.classes} if kind.classes else {})
        self._numbers = {column: {name: number for number, name in enumerate(of)} for column, of in names.items()}
        features: dict[str, Any] = {column: {"names": list(of), "_type": "ClassLabel"} for column, of in names.items()}
        if kind.fits_png:
            value = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
            features = {"image": {"_type": "Image"}} | features
        else:
            dtype = kind.numbers(torch.zeros(1, *kind.shape)).dtype
            value = pa.list_(pa.from_numpy_dtype(dtype), length)
            features = {
                "values": {"feature": {"dtype": str(dtype), "_type": "Value"}, "length": length, "_type": "List"}
            } | features
        columns = [(next(iter(features)), value), *((column, pa.int64()) for column in names)]
        told = {"huggingface": json.dumps({"info": {"features": features}})}
        self._schema = pa.schema(columns, metadata=told)
        (folder / "data").mkdir()
        path = folder / "data" / "train-00000-of-00001.parquet"
        self._file = importlib.import_module("pyarrow.parquet").ParquetWriter(path, self._schema)

    def add(self, x: Tensor, group: str, label: str) -> None:
        """Write the records as a row group of the Parquet file."""
        first = self._schema.names[0]
        rows: list[Any] = (
            [{"bytes": _png(pixels), "path": None} for pixels in self._kind.modality.encode(x)]
            if self._kind.fits_png
            else self._kind.numbers(x).reshape(len(x), -1).tolist()
        )
        table = {first: rows, "group": [self._numbers["group"][group]] * len(x)}
        if label:
            table["label"] = [self._numbers["label"][label]] * len(x)
        self._file.write_table(self._arrow.table(table, schema=self._schema))

    def close(self) -> None:
        """Write the footer, without which nobody can read the file."""
        self._file.close()


FORMATS: dict[str, Callable[[Path, RecordKind], Writer]] = {
    "folder": FolderWriter,
    "npz": NpzWriter,
    "parquet": ParquetWriter,
}
# Where Hugging Face finds the records; it reads no npz.
DATA_FILES = {"folder": "data/**", "parquet": "data/*.parquet"}


def _pyarrow() -> ModuleType:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise MissingExtraError(
            "--format parquet needs the package 'pyarrow'; install it with: pip install 'fedloom[release]'"
        ) from error
