from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.errors import DataError
from fedloom.runs.images import MARGIN, grid_of, save_grid


@pytest.mark.parametrize("channels", [1, 3])
def test_tiles_lie_row_by_row_inside_white_margins(channels: int, tmp_path: Path) -> None:
    images = torch.linspace(0, 1, 5).reshape(5, 1, 1, 1).expand(5, channels, 4, 6)
    save_grid(images, tmp_path / "grid.png", columns=3)
    pixels = np.asarray(Image.open(tmp_path / "grid.png"))
    assert pixels.shape[:2] == (2 * (4 + MARGIN) + MARGIN, 3 * (6 + MARGIN) + MARGIN)
    assert pixels.ndim == (2 if channels == 1 else 3)
    canvas = pixels.copy()
    for index, grey in enumerate([0, 64, 128, 191, 255]):
        row, column = divmod(index, 3)
        top, left = MARGIN + row * (4 + MARGIN), MARGIN + column * (6 + MARGIN)
        assert (pixels[top : top + 4, left : left + 6] == grey).all()
        canvas[top : top + 4, left : left + 6] = 255
    assert (canvas == 255).all()


def test_values_outside_the_range_are_cut_and_grids_are_about_square() -> None:
    grid = grid_of(torch.tensor([-1.0, 2.0]).reshape(2, 1, 1, 1).expand(2, 1, 2, 2))
    assert np.asarray(grid)[2, [2, 6]].tolist() == [0, 255]
    assert grid_of(torch.zeros(16, 1, 2, 2)).size == (18, 18)


@pytest.mark.parametrize("shape", [(3, 8), (3, 2, 4, 4)])
def test_records_that_are_no_images_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"(vectors|images) of shape .* have no pictures"):
        grid_of(torch.zeros(shape))
