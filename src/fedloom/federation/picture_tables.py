"""Pictures in the rows of tables: folders of Hugging Face ``datasets``, and Parquet files."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.config import ColumnsConfig
from fedloom.errors import DataError, FedloomError, MissingExtraError, unknown
from fedloom.federation.arrays import Column, Examples, assemble, column, joined
from fedloom.federation.files import existing
from fedloom.federation.picture_files import PictureReader, picture_within
from fedloom.federation.picture_folders import Layout, warn_of_travellers
from fedloom.federation.records import Dataset

IMAGE, LABEL = "image", "label"
FOUND_BY_NAME = (IMAGE, LABEL)  # where data.columns says nothing
ENDINGS = (".parquet", ".arrow")
SPLIT = re.compile(r"(?:^|[^a-z])(train|test|validation|val)(?:[^a-z]|$)")
TRAIN, TEST = "train", "test"


def load_picture_tables(path: str, layout: Layout | None = None) -> Dataset:
    """A folder that ``datasets`` saved or downloaded, or a single Parquet file with a column of pictures.

    ``data.columns`` says which column is the ``image``, its ``label``, its ``group``, the ``silo`` that has it and the
    ``subject`` whose it is. The split ``test`` is held out; without it a tenth is. ``validation`` is left out.
    """
    layout = layout or Layout()
    root = existing(path, "hugging-face", "a folder of Hugging Face datasets, or a Parquet file")
    if layout.subjects:
        raise DataError("data.subjects is for pictures in files; data.columns.subject names the column of a table")
    files = [root] if root.is_file() else sorted(file for file in root.rglob("*") if file.suffix in ENDINGS)
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(_split(file, root), []).append(file)
    if TRAIN not in splits:
        raise DataError(f"data.path = '{path}' holds no Parquet or Arrow file to train on")
    reader = PictureReader(layout.rule)
    train = _examples(splits[TRAIN], reader, layout)
    test = _examples(splits[TEST], reader, layout) if TEST in splits else None
    warn_of_travellers([train, *([test] if test else [])])
    return assemble(root.resolve().stem, train, test)


def _split(file: Path, root: Path) -> str:
    """The split by the file's own name, or by the folder that it lies in."""
    inner = () if file == root else file.relative_to(root).parts
    found = next((match[1] for part in reversed(inner) if (match := SPLIT.search(part.lower()))), TRAIN)
    return "validation" if found == "val" else found


def _examples(files: list[Path], reader: PictureReader, layout: Layout) -> Examples:
    pixels, columns = [], dict[str, list[Column]]()
    for file in files:
        table = _table(file)
        names, told = _names(table, file, layout.columns), _told_features(table)
        for row, cell in enumerate(table[names.pop(IMAGE)].to_pylist()):
            place = Path(f"{file}, row {row}")
            pixels.append(reader.take(picture_within(_content(cell, place), place), place)[0])
        for role, name in names.items():
            found = _column(table[name].to_pylist(), told.get(name, {}), f"{file}: {name}")
            columns.setdefault(role, []).append(found)
    if not pixels:
        raise DataError(f"{files[0]} has no rows")
    if lacking := next((role for role, parts in columns.items() if len(parts) != len(files)), None):
        raise DataError(f"some files beside {files[0]} have no column for '{lacking}', and others do")
    whole = {role: joined(parts) for role, parts in columns.items()}
    return Examples(
        torch.from_numpy(np.stack(pixels)),
        y=whole.get(LABEL),
        group=whole.get("group"),
        owner=whole.get("silo"),
        subject=whole.get("subject"),
    )


def _table(file: Path) -> Any:
    try:
        if file.suffix == ".parquet":
            return importlib.import_module("pyarrow.parquet").read_table(file)
        arrow = importlib.import_module("pyarrow")
        with arrow.memory_map(str(file)) as opened:
            return arrow.ipc.open_stream(opened).read_all()
    except ImportError as error:
        raise MissingExtraError(
            f"{file} needs the package 'pyarrow'; install it with: pip install 'fedloom[release]'"
        ) from error
    except FedloomError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's own are among them
        raise DataError(f"cannot read {file} as a table: {error}") from error


def _names(table: Any, file: Path, given: ColumnsConfig) -> dict[str, str]:
    """The columns of a table by what is in them; the pictures' is known by its type too."""
    found = {role: role for role in FOUND_BY_NAME if role in table.column_names}
    found |= {role: name for role, name in asdict(given).items() if name}
    if IMAGE not in found:
        pictures = [column.name for column in table.schema if _holds_pictures(column.type)]
        if len(pictures) != 1:
            raise DataError(
                f"{file} has {'several columns' if pictures else 'no column'} of pictures; data.columns.image names "
                f"one of {', '.join(pictures or table.column_names)}"
            )
        found[IMAGE] = pictures[0]
    for role, name in found.items():
        if name not in table.column_names:
            raise DataError(f"{file}: data.columns.{role}: " + unknown("column", name, table.column_names))
    return found


def _holds_pictures(kind: Any) -> bool:
    return str(kind).startswith("struct<") and {each.name for each in kind} == {"bytes", "path"}


def _content(cell: Any, place: Path) -> bytes:
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(content, bytes):
        raise DataError(f"{place} holds no picture: it must lie in the table itself, as a file's bytes")
    return content


def _told_features(table: Any) -> Mapping[str, Any]:
    """What ``datasets`` says of the columns."""
    try:
        found = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _column(cells: list[Any], feature: Mapping[str, Any], where: str) -> Column:
    """Texts or whole numbers; the numbers of a class by its names, where they are known."""
    if feature.get("_type") == "ClassLabel" and feature.get("names"):
        names = feature["names"]  # datasets says -1 where nothing is known
        cells = [names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else "" for cell in cells]
    if lacking := [row for row, cell in enumerate(cells) if cell is None]:
        raise DataError(f"{where} is empty in row {lacking[0]}; give a text or a whole number to all")
    return column(cells, len(cells), where)
