from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.config import DataConfig, load_config
from fedloom.errors import DataError
from fedloom.federation.building import build_federation
from fedloom.federation.charm import FILE, GROUPS, load_charm
from fedloom.streams import Streams
from support import names_in

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "make_charm.py"
TRAIN, TEST = 103, 2  # one full row of tiles and a started one; a row that is mostly empty


def make_charm(*arguments: object) -> int:
    status: int = runpy.run_path(str(SCRIPT))["main"]([str(argument) for argument in arguments])
    return status


def colour(domain: int, tile: int) -> tuple[int, int, int]:
    """Tells domain and tile apart even after JPEG has shifted values by a few."""
    return 40 * domain + 20, 20 * (tile // 10), 20 * (tile % 10)


def draw_mosaic(file: Path, domain: int, count: int) -> None:
    rows = -(-count // 100)
    mosaic = np.zeros((rows * 32, 3200, 3), dtype=np.uint8)
    for tile in range(count):
        row, place = divmod(tile, 100)
        mosaic[row * 32 : row * 32 + 32, place * 32 : place * 32 + 32] = colour(domain, tile)
    Image.fromarray(mosaic).save(file, quality=95, subsampling=0)


@pytest.fixture(scope="module")
def mosaics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mosaics")
    for number, domain in enumerate(GROUPS):
        draw_mosaic(folder / f"{domain}_train_{TRAIN}.jpg", number, TRAIN)
        draw_mosaic(folder / f"{domain}_test_{TEST}.jpg", number, TEST)
    return folder


@pytest.fixture(scope="module")
def charm(mosaics: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / FILE
    assert make_charm(mosaics, "--out", out) == 0
    return out


@pytest.fixture(autouse=True)
def _no_data_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "no-cache"))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)


def test_every_tile_becomes_the_image_of_its_domain_and_place(charm: Path) -> None:
    dataset = load_charm(str(charm))
    assert dataset.groups == GROUPS
    assert dataset.train.x.dtype == torch.uint8
    for records, count in ((dataset.train, TRAIN), (dataset.test, TEST)):
        assert records.x.shape == (5 * count, 3, 32, 32)
        assert records.group.tolist() == [group for group in range(5) for _ in range(count)]
        expected = torch.tensor([colour(group, tile) for group in range(5) for tile in range(count)])
        assert (records.x.int() - expected[:, :, None, None]).abs().max() <= 4
    assert names_in(charm.parent) == [FILE.name]  # no temporary file stays


@pytest.mark.parametrize("variable", ["FEDLOOM_CACHE", "FEDLOOM_DATA"])
def test_the_file_is_found_where_data_are_kept(charm: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, str(charm.parents[1]))
    assert len(load_charm("").train) == 5 * TRAIN


def test_the_protocol_divides_each_domain_among_twenty_silos(charm: Path) -> None:
    config = load_config("fissionvae/charm", [f"data.path={charm}"])
    federation = build_federation(config.data, Streams(0))
    assert [silo.groups for silo in federation.silos] == [(group,) for group in range(5) for _ in range(20)]
    assert {len(silo) for silo in federation.silos} == {TRAIN // 20, TRAIN // 20 + 1}


@pytest.mark.parametrize("path", ["", "nowhere.npz"])
def test_absence_says_how_to_get_it(path: str) -> None:
    with pytest.raises(DataError, match=r"CHARM is not on this machine .*\.npz.*docs/how-to/charm\.md"):
        build_federation(DataConfig(source="charm", path=path), Streams(0))


@pytest.mark.parametrize(
    "arrays",
    [
        {"x_train": np.zeros((10, 32, 32, 3), np.uint8), "group_train": np.repeat(["human", "cartoon"], 5)},
        {"x_train": np.zeros((10, 28, 28, 3), np.uint8), "group_train": np.repeat(GROUPS, 2)},
    ],
    ids=["other groups", "other size"],
)
def test_another_npz_is_refused(arrays: dict[str, Any], tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(DataError, match=r"other\.npz is not CHARM: its groups are .*, (human|remote) and .*shape"):
        load_charm(str(tmp_path / "other.npz"))


def without_a_domain(folder: Path) -> None:
    (folder / f"human_test_{TEST}.jpg").unlink()


def twice(folder: Path) -> None:
    (folder / "human_test_9.jpg").write_bytes(b"")


def count_too_large(folder: Path) -> None:
    (folder / f"marine_train_{TRAIN}.jpg").rename(folder / "marine_train_201.jpg")


def too_narrow(folder: Path) -> None:
    Image.new("RGB", (64, 32)).save(folder / f"marine_train_{TRAIN}.jpg")


def no_image(folder: Path) -> None:
    (folder / f"remote_train_{TRAIN}.jpg").write_bytes(b"rubbish")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (without_a_domain, "must hold one file human_test_<count>.jpg; it holds 0 such files"),
        (twice, "must hold one file human_test_<count>.jpg; it holds 2 such files"),
        (count_too_large, "marine_train_201.jpg is 3200x64 pixels: no mosaic of 201 tiles, 100 a row"),
        (too_narrow, f"marine_train_{TRAIN}.jpg is 64x32 pixels: no mosaic of {TRAIN} tiles, 100 a row"),
        (no_image, f"remote_train_{TRAIN}.jpg as an image"),
    ],
)
def test_wrong_mosaics_are_named_and_nothing_is_written(
    mosaics: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, out = tmp_path / "mosaics", tmp_path / "charm.npz"
    shutil.copytree(mosaics, folder)
    spoil(folder)
    assert make_charm(folder, "--out", out) == 2
    assert sentence in capsys.readouterr().err
    assert not out.exists()
