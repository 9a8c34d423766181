from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.config import DataConfig
from fedloom.errors import ConfigError, DataError, FedloomError, FedloomWarning
from fedloom.federation import sample
from fedloom.federation.building import SiloSummary, build_federation, describe
from fedloom.federation.records import Federation
from fedloom.federation.sources import SOURCES, is_public
from fedloom.streams import Streams


def build(**settings: object) -> Federation:
    return build_federation(DataConfig(**settings), Streams(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_embedded_sample_is_balanced_and_of_images(name: str) -> None:
    dataset = SOURCES[f"{name}-sample"].load("")
    assert dataset.name == f"{name}-sample"
    assert dataset.groups == (name,)
    assert dataset.train.x.shape == (6000, 1, 28, 28)
    assert dataset.test.x.shape == (1000, 1, 28, 28)
    assert dataset.train.x.dtype == torch.uint8
    assert torch.bincount(dataset.train.y).tolist() == [600] * 10
    assert torch.bincount(dataset.test.y).tolist() == [100] * 10


def test_the_sample_keeps_the_published_order() -> None:
    # The first labels of the two training files, as published; no class is full among them.
    assert SOURCES["mnist-sample"].load("").train.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert SOURCES["fashion-mnist-sample"].load("").train.y[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]


def test_mixed_mnist_numbers_classes_on() -> None:
    dataset = SOURCES["mixed-mnist-sample"].load("")
    assert dataset.groups == ("mnist", "fashion-mnist")
    assert len(dataset.classes) == 20
    assert (dataset.classes[0], dataset.classes[11]) == ("mnist/0", "fashion-mnist/trouser")
    assert torch.equal(dataset.train.group, (dataset.train.y >= 10).long())
    assert torch.bincount(dataset.test.y).tolist() == [100] * 20


def test_the_embedded_sample_stays_small() -> None:
    sizes = [path.stat().st_size for path in sample.FOLDER.glob("*.xz")]
    assert len(sizes) == len(sample.SHA256) == 14
    assert sum(sizes) < 6_000_000


def test_a_damaged_or_missing_sample_is_named(tmp_path: Path) -> None:
    file = "mnist-test-labels-0.idx.xz"
    with pytest.raises(DataError, match=f"cannot read the embedded sample .*{file}"):
        sample.load("mnist", "test", "labels", tmp_path)
    content = bytearray((sample.FOLDER / file).read_bytes())
    content[100] ^= 1
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=f"{file} is damaged"):
        sample.load("mnist", "test", "labels", tmp_path)


def test_the_centralised_layout_pools_what_the_silos_hold() -> None:
    federated = build(silos=3, records_per_silo=50)
    centralised = build(silos=3, records_per_silo=50, layout="centralised")
    assert [silo.name for silo in centralised.silos] == ["centralised"]
    assert centralised.silos[0].groups == (0, 1)
    assert torch.equal(centralised.silos[0].train.x, torch.cat([silo.train.x for silo in federated.silos]))


def test_disjoint_classes_split_mixed_mnist_into_pairs() -> None:
    summaries = describe(build(partition="classes", silos=10))
    assert summaries[0] == SiloSummary("silo-0", ("mnist",), 1200, {"mnist/0": 600, "mnist/1": 600})
    assert summaries[9].groups == ("fashion-mnist",)
    assert summaries[9].classes == {"fashion-mnist/bag": 600, "fashion-mnist/ankle-boot": 600}


def test_an_unknown_source_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"data\.source: unknown source 'mnist-smple'; did you mean 'mnist-sample'"):
        build(source="mnist-smple")


def picture(path: Path, value: int = 0, size: tuple[int, int] = (4, 3), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)[: len(mode)]).save(path)


def folders(root: Path, **settings: object) -> Federation:
    return build(source="image-folders", path=str(root), partition="natural", **settings)


def test_image_folders_become_silos_with_groups_and_classes(tmp_path: Path) -> None:
    for i in range(20):
        picture(tmp_path / "ct__hospital-b" / ("cat" if i % 2 else "dog") / f"{i:02}.png", i)
    for i in range(10):
        picture(tmp_path / "hospital-a" / f"{i}.PNG", 100 + i)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "hospital-a" / "notes.txt").write_text("not an image")
    with pytest.warns(FedloomWarning, match=r"left out, because they are no pictures: hospital-a/notes\.txt$"):
        federation = folders(tmp_path)
    assert federation.shape == (1, 3, 4)
    assert federation.groups == ("all", "ct")
    assert federation.classes == ("cat", "dog")
    assert [(s.name, s.groups, s.records) for s in describe(federation)] == [
        ("ct__hospital-b", ("ct",), 18),
        ("hospital-a", ("all",), 9),
    ]
    assert describe(federation)[1].classes == {"unlabelled": 9}
    # Pixels say which image it is: nothing is lost, and labels stay with their images.
    held = [*(silo.train for silo in federation.silos), federation.test]
    pixels = torch.cat([records.x[:, 0, 0, 0] for records in held]).tolist()
    labels = torch.cat([records.y for records in held]).tolist()
    assert sorted(pixels) == [*range(20), *range(100, 110)]
    assert all(label == (-1 if value >= 100 else 1 - value % 2) for value, label in zip(pixels, labels, strict=True))
    assert sorted(federation.test.group.tolist()) == [0, 1, 1]


def test_a_test_folder_holds_the_held_out_images(tmp_path: Path) -> None:
    for i in range(3):
        picture(tmp_path / "a" / "cat" / f"{i}.png", i)
        picture(tmp_path / "b" / "dog" / f"{i}.png", 10 + i)
    picture(tmp_path / "a" / "test" / "dog" / "0.png", 99)
    federation = folders(tmp_path)
    assert [len(silo) for silo in federation.silos] == [3, 3]
    assert federation.test.x.flatten().unique().tolist() == [99]
    assert federation.test.y.tolist() == [federation.classes.index("dog")]


def test_colour_jpegs_have_three_channels(tmp_path: Path) -> None:
    for i in range(2):
        picture(tmp_path / "a" / f"{i}.jpeg", 200, mode="RGB", size=(8, 8))
    x = folders(tmp_path).silos[0].train.x
    assert x.shape == (1, 3, 8, 8)
    assert x[0, 0].float().mean() > 190  # red
    assert x[0, 1:].float().mean() < 10


def spoil_size(root: Path) -> None:
    picture(root / "b" / "wide.png", size=(5, 3))


def spoil_mode(root: Path) -> None:
    picture(root / "b" / "red.png", mode="RGB")


def spoil_alpha(root: Path) -> None:
    Image.new("RGBA", (4, 3)).save(root / "a" / "0.png")


def spoil_bytes(root: Path) -> None:
    (root / "a" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n but not really")


def spoil_truncated(root: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (3, 4), dtype=np.uint8)
    Image.fromarray(noise).save(root / "a" / "0.png")
    content = (root / "a" / "0.png").read_bytes()
    (root / "a" / "0.png").write_bytes(content[:45])


def spoil_empty_silo(root: Path) -> None:
    (root / "empty").mkdir()


def spoil_empty_class(root: Path) -> None:
    (root / "a" / "unicorn").mkdir()


def spoil_root_test(root: Path) -> None:
    picture(root / "test" / "0.png")


def spoil_all(root: Path) -> None:
    shutil.rmtree(root / "a")
    shutil.rmtree(root / "b")


def spoil_too_few(root: Path) -> None:
    (root / "a" / "1.png").unlink()
    (root / "b" / "1.png").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_size, r"wide.png is 5x3 grey, but .*0.png is 4x3 grey; all images must have one size and mode"),
        (spoil_mode, r"red.png is 4x3 colour, but .*0.png is 4x3 grey"),
        (spoil_alpha, r"0.png has mode RGBA, .* data.mode = 'grey' or 'colour' makes it so"),
        (spoil_bytes, r"cannot read .*0.png as an image"),
        (spoil_truncated, r"cannot read .*0.png as an image"),
        (spoil_empty_silo, r"empty holds no images"),
        (spoil_empty_class, r"unicorn holds no images"),
        (spoil_root_test, r"put a silo's held-out images into 'test' inside it"),
        (spoil_all, r"holds no folders"),
        (spoil_too_few, r"too few examples"),
    ],
)
def test_bad_image_folders_are_named(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    for silo in ("a", "b"):
        for i in range(2):
            picture(tmp_path / silo / f"{i}.png", i)
    assert len(folders(tmp_path)) == 2
    spoil(tmp_path)
    with pytest.raises(DataError, match=message):
        folders(tmp_path)


def test_a_source_with_a_stand_in_takes_it_where_no_path_is_named(tmp_path: Path) -> None:
    standing, sample = build(source="images", silos=2), build(source="mixed-mnist-sample", silos=2)
    assert standing.digest == sample.digest
    assert is_public(DataConfig(source="images"))
    for silo in ("a", "b"):
        for i in range(2):
            picture(tmp_path / silo / f"{i}.png", i)
    own = DataConfig(source="images", path=str(tmp_path))
    assert build_federation(own, Streams(0)).digest == folders(tmp_path).digest
    assert not is_public(own)


@pytest.mark.parametrize("source", ["image-folders", "npz"])
@pytest.mark.parametrize(("path", "message"), [("", "data.path is empty"), ("nowhere", "'nowhere' does not exist")])
def test_a_missing_path_is_named(source: str, path: str, message: str) -> None:
    with pytest.raises(FedloomError, match=message):
        build(source=source, path=path)


def npz(path: Path, **arrays: object) -> Path:
    np.savez(path / "data.npz", **arrays)  # type: ignore[arg-type]
    return path / "data.npz"


PIXELS = np.arange(20, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 3), dtype=np.uint8)


def test_npz_with_everything(tmp_path: Path) -> None:
    path = npz(
        tmp_path,
        x_train=PIXELS,
        y_train=np.arange(20) % 4,
        group_train=np.where(np.arange(20) < 8, "mr", "ct"),
        owner_train=np.arange(20) % 2 + 5,
        x_test=PIXELS[:2],
        y_test=np.array([3, -1]),
        group_test=np.array(["ct", "mr"]),
    )
    federation = build(source="npz", path=str(path), partition="natural")
    assert federation.groups == ("ct", "mr")
    assert federation.classes == ("0", "1", "2", "3")
    assert [silo.name for silo in federation.silos] == ["5", "6"]
    assert federation.silos[1].train.x[:, 0, 0, 0].tolist() == list(range(1, 20, 2))
    assert federation.silos[1].train.y.tolist() == [1, 3] * 5
    assert federation.silos[1].train.group.tolist() == [1] * 4 + [0] * 6
    assert (federation.test.y.tolist(), federation.test.group.tolist()) == ([3, -1], [0, 1])


def test_npz_with_nothing_but_x_holds_out_a_tenth(tmp_path: Path) -> None:
    federation = build(source="npz", path=str(npz(tmp_path, x_train=PIXELS)), silos=3)
    assert [len(silo) for silo in federation.silos] == [6, 6, 6]
    assert federation.groups == ("all",)
    assert federation.classes == ()
    values = [*federation.test.x[:, 0, 0, 0].tolist()]
    values += [value for silo in federation.silos for value in silo.train.x[:, 0, 0, 0].tolist()]
    assert sorted(values) == list(range(20))


def test_the_held_out_tenth_is_the_same_for_every_seed(tmp_path: Path) -> None:
    config = DataConfig(source="npz", path=str(npz(tmp_path, x_train=PIXELS)), silos=3)
    first, second = (build_federation(config, Streams(seed)) for seed in (1, 2))
    assert torch.equal(first.test.x, second.test.x)
    assert not torch.equal(first.silos[0].train.x, second.silos[0].train.x)


def test_npz_as_medmnist_writes_it(tmp_path: Path) -> None:
    colour = np.stack([PIXELS, PIXELS + 50, PIXELS + 100], axis=-1)
    labels = (np.arange(20) % 3)[:, None].astype(np.uint8)
    path = npz(
        tmp_path,
        train_images=colour,
        train_labels=labels,
        val_images=colour[:5],
        val_labels=labels[:5],
        test_images=colour[:4],
        test_labels=labels[:4],
    )
    federation = build(source="npz", path=str(path), silos=1)
    assert federation.shape == (3, 2, 3)
    assert len(federation.silos[0]) == 20
    assert federation.test.x[2, :, 0, 0].tolist() == [2, 52, 102]
    assert federation.test.y.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": PIXELS}, "has no array 'x_train'"),
        ({"x_train": PIXELS.astype(np.int32)}, "x_train of .* holds int32 values; give uint8 images or floats"),
        ({"x_train": PIXELS[:, 0, 0]}, r"has shape \(20,\)"),
        ({"x_train": PIXELS[:, 0]}, r"has shape \(20, 3\)"),
        ({"x_train": PIXELS[:0]}, r"has shape \(0, 2, 3\)"),
        ({"x_train": np.full((4, 2), np.nan)}, "not finite"),
        ({"x_train": PIXELS, "y_train": np.zeros(19, int)}, r"y_train of .* has shape \(19,\)"),
        ({"x_train": PIXELS, "y_train": np.zeros((20, 2), int)}, r"has shape \(20, 2\)"),
        ({"x_train": PIXELS, "y_train": np.zeros(20)}, "holds float64 values; give whole numbers or texts"),
        ({"x_train": PIXELS, "x_test": PIXELS[:, :1]}, "held-out examples of 'data' are"),
        ({"x_train": PIXELS, "group_train": np.zeros(20, int), "x_test": PIXELS}, "no group; give one to all"),
        ({"x_train": PIXELS, "owner_train": np.arange(20) % 2 - 1}, "no owner; give one to all"),
        (
            {"x_train": PIXELS, "y_train": np.zeros(20, int), "x_test": PIXELS, "y_test": np.array(["a"] * 20)},
            "whole numbers here and texts there",
        ),
        ({"x_train": np.array([None, 1], dtype=object)}, r"data.npz as an .npz file: .* holds Python objects$"),
    ],
)
def test_bad_npz_files_are_named(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(source="npz", path=str(npz(tmp_path, **arrays)), silos=1)


@pytest.mark.parametrize("content", [b"", b"rubbish", b"PK\x03\x04 rubbish", None])
def test_a_file_that_is_no_npz_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "data.npz"
    if content is None:  # a single array in numpy's own format
        with path.open("wb") as stream:
            np.save(stream, PIXELS)
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read .*data.npz as an .npz file"):
        build(source="npz", path=str(path))
