"""Records as files that people look at."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from fedloom.errors import DataError
from fedloom.modalities.base import modality_of
from fedloom.runs.files import write_atomically

MARGIN = 2


def grid_of(x: Tensor, columns: int = 0, margin: int = MARGIN, kind: str = "") -> Image.Image:
    """The tiles of records of a kind, as models see them, side by side; about as wide as high unless told."""
    shape = tuple(x.shape[1:])
    tiles = modality_of(kind, shape).tiles(x)
    if tiles is None:
        raise DataError(f"{modality_of(kind, shape).plural} of shape {shape} have no pictures: no grid can be drawn")
    count, height, width, channels = tiles.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    canvas = np.full((rows * (height + margin) + margin, columns * (width + margin) + margin, channels), 255, np.uint8)
    for index, tile in enumerate(tiles):
        top, left = (
            margin + size * place
            for size, place in zip((height + margin, width + margin), divmod(index, columns), strict=True)
        )
        canvas[top : top + height, left : left + width] = tile
    return Image.fromarray(canvas.squeeze(-1) if channels == 1 else canvas)


def save_shown(x: Tensor, path: Path, columns: int = 0, kind: str = "") -> Path:
    """Write records as people look at them, with the ending that fits: a grid as .png, or a table as .csv."""
    shown = modality_of(kind, tuple(x.shape[1:])).shown(x)
    if not isinstance(shown, Mapping):
        path = path.with_name(f"{path.name}.png")
        save_grid(x, path, columns, kind)
        return path
    path = path.with_name(f"{path.name}.csv")
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(shown)
    writer.writerows(zip(*(column.tolist() for column in shown.values()), strict=True))
    write_atomically(path, lines.getvalue().encode())
    return path


def save_grid(x: Tensor, path: Path, columns: int = 0, kind: str = "") -> None:
    """Write a grid as PNG."""
    buffer = io.BytesIO()
    grid_of(x, columns, kind=kind).save(buffer, format="PNG")
    write_atomically(path, buffer.getvalue())
