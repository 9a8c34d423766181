"""Images as files."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from fedloom.errors import DataError
from fedloom.runs.files import write_atomically

MARGIN = 2


def grid_of(images: Tensor, columns: int = 0, margin: int = MARGIN) -> Image.Image:
    """Images in [0, 1], shape (n, 1 or 3, height, width), side by side; about as wide as high unless told."""
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise DataError(
            f"records of shape {tuple(images.shape[1:])} are no images of 1 or 3 channels: no grid can be drawn"
        )
    count, channels, height, width = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    canvas = np.full((rows * (height + margin) + margin, columns * (width + margin) + margin, channels), 255, np.uint8)
    pixels = (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    for index, tile in enumerate(pixels):
        top, left = (
            margin + size * place
            for size, place in zip((height + margin, width + margin), divmod(index, columns), strict=True)
        )
        canvas[top : top + height, left : left + width] = tile
    return Image.fromarray(canvas.squeeze(-1) if channels == 1 else canvas)


def save_grid(images: Tensor, path: Path, columns: int = 0) -> None:
    """Write a grid as PNG."""
    buffer = io.BytesIO()
    grid_of(images, columns).save(buffer, format="PNG")
    write_atomically(path, buffer.getvalue())
