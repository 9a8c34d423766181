from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.reports.pictures import WIDEST, data_uri, grid, samples_of, thinned
from fedloom.runs.images import grid_of, save_grid


def decoded(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition("base64,")[2])))


def write_grids(run: Path, rounds: range, names: tuple[str, ...] = ("mnist",)) -> None:
    noise = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for number in rounds:
        folder = run / "samples" / f"round-{number:04d}"
        folder.mkdir(parents=True)
        for name in names:
            save_grid(noise, folder / f"{name}.png")


@pytest.mark.parametrize(
    ("most", "expected"), [(9, list(range(1, 8))), (7, list(range(1, 8))), (3, [1, 4, 7]), (2, [1, 7]), (1, [7])]
)
def test_rounds_are_thinned_evenly_and_keep_both_ends(most: int, expected: list[int]) -> None:
    assert thinned(list(range(1, 8)), most) == expected


def test_grey_pictures_keep_every_pixel() -> None:
    images = torch.rand(4, 1, 5, 5, generator=torch.Generator().manual_seed(2))
    assert np.array_equal(np.asarray(decoded(grid(images))), np.asarray(grid_of(images)))


def test_coloured_pictures_are_jpeg_and_wide_ones_shrink() -> None:
    wide = decoded(data_uri(Image.new("RGB", (2 * WIDEST, 100), (255, 0, 0))))
    assert (wide.format, wide.size) == ("JPEG", (WIDEST, 50))


def test_films_have_a_frame_for_each_round_in_the_order_of_groups(tmp_path: Path) -> None:
    write_grids(tmp_path, range(1, 4), ("a", "b", "other"))
    found = samples_of(tmp_path, ("b", "a"), budget=10**6)
    assert [(group, *film) for group, film in found.films.items()] == [
        ("b", 1, 2, 3),
        ("a", 1, 2, 3),
        ("other", 1, 2, 3),
    ]
    assert found.broken == ()


def test_a_film_bears_the_name_of_its_group(tmp_path: Path) -> None:
    write_grids(tmp_path, range(1, 2), ("north_sea__1", "south"))
    assert list(samples_of(tmp_path, ("north sea (1", "west"), budget=10**6).films) == ["north sea (1", "south"]


def test_a_small_budget_leaves_fewer_rounds_and_always_the_last(tmp_path: Path) -> None:
    write_grids(tmp_path, range(1, 9))
    whole = samples_of(tmp_path, (), budget=10**9).films["mnist"]
    size = len(whole[8])
    assert list(samples_of(tmp_path, (), budget=4 * size).films["mnist"]) == thinned(list(range(1, 9)), 4)
    assert list(samples_of(tmp_path, (), budget=0).films["mnist"]) == [8]


def test_no_run_no_films(tmp_path: Path) -> None:
    assert samples_of(tmp_path, (), budget=10**6).films == {}


def test_a_png_cut_short_anywhere_is_named_and_left_out(tmp_path: Path) -> None:
    write_grids(tmp_path, range(1, 2))
    file = tmp_path / "samples" / "round-0001" / "mnist.png"
    whole = file.read_bytes()
    for length in [*range(60), *range(60, len(whole) - 16, 97)]:
        file.write_bytes(whole[:length])
        found = samples_of(tmp_path, (), budget=10**6)
        assert (found.films, found.broken) == ({}, ("samples/round-0001/mnist.png",)), length


@pytest.mark.parametrize("content", [b"", b"<svg onload=alert(1)>", b"GIF89a", "folder", "bomb"])
def test_what_is_no_picture_is_named(tmp_path: Path, content: bytes | str) -> None:
    file = tmp_path / "samples" / "round-0001" / "mnist.png"
    file.parent.mkdir(parents=True)
    if content == "folder":
        file.mkdir()
    elif content == "bomb":
        Image.new("1", (20_000, 20_000)).save(file)
    else:
        assert isinstance(content, bytes)
        file.write_bytes(content)
    assert samples_of(tmp_path, (), budget=10**6).broken == ("samples/round-0001/mnist.png",)
