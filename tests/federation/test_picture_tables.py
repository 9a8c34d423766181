"""Pictures in tables of Hugging Face ``datasets``: what it saves is read back, by our rules."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fedloom.config import ColumnsConfig, DataConfig
from fedloom.errors import ConfigError, DataError, FedloomError, FedloomWarning
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.settings import parse
from fedloom.streams import Streams

SITES = ["north", "north", "south", "south"] * 5


def pictures(count: int, first: int = 0) -> list[Image.Image]:
    """Each of one value of its own."""
    return [Image.fromarray(np.full((6, 8), first + number, dtype=np.uint8)) for number in range(count)]


def table(count: int = 20, first: int = 0) -> datasets.Dataset:
    features = datasets.Features(
        {
            "scan": datasets.Image(),
            "label": datasets.ClassLabel(names=["well", "ill"]),
            "site": datasets.Value("string"),
            "patient": datasets.Value("string"),
        }
    )
    rows = {
        "scan": pictures(count, first),
        "label": [number % 2 for number in range(count)],
        "site": SITES[:count],
        "patient": [f"p{number // 2}" for number in range(count)],
    }
    return datasets.Dataset.from_dict(rows, features=features)


def built(path: Path, **settings: object) -> Federation:
    return build_federation(parse(DataConfig, {"source": "hugging-face", "path": str(path), **settings}), Streams(0))


def values(federation: Federation, silo: int) -> set[int]:
    return set(federation.silos[silo].train.x[:, 0, 0, 0].tolist())


def check_whole(federation: Federation, held_out: set[int]) -> None:
    assert [silo.name for silo in federation.silos] == ["north", "south"]
    assert (federation.shape, federation.classes) == ((1, 6, 8), ("ill", "well"))
    north = {number for number in range(20) if SITES[number] == "north"}
    assert values(federation, 0) == north - held_out
    assert values(federation, 1) == set(range(20)) - north - held_out
    first = federation.silos[0].train
    assert first.subject is not None
    for value, label, subject in zip(
        first.x[:, 0, 0, 0].tolist(), first.y.tolist(), first.subject.tolist(), strict=True
    ):
        assert label == 1 - value % 2  # "ill" is class 0 here and 1 there
        assert [f"p{number}" for number in sorted(map(str, range(10)))][subject] == f"p{value // 2}"


COLUMNS = {"silo": "site", "subject": "patient"}


def test_a_folder_with_splits_that_datasets_saved(tmp_path: Path) -> None:
    splits = datasets.DatasetDict({"train": table(), "test": table(3, 100), "validation": table(2, 200)})
    splits.save_to_disk(str(tmp_path / "saved"))
    federation = built(tmp_path / "saved", columns=COLUMNS)
    check_whole(federation, held_out=set())
    assert sorted(federation.test.x[:, 0, 0, 0].tolist()) == [100, 101, 102]


@pytest.mark.parametrize("inside", ["data/train-00000-of-00001.parquet", "default/train/0000.parquet", "all.parquet"])
def test_parquet_files_as_hubs_hold_them(inside: str, tmp_path: Path) -> None:
    file = tmp_path / "hub" / inside
    file.parent.mkdir(parents=True)
    table().to_parquet(str(file))
    federation = built(tmp_path / "hub", columns=COLUMNS)
    held_out = set(federation.test.x[:, 0, 0, 0].tolist())
    assert len(held_out) == 2  # a tenth of each silo's ten
    check_whole(federation, held_out)
    if inside == "all.parquet":
        assert built(file, columns=COLUMNS).digest == federation.digest


def test_pictures_follow_the_rules_of_pictures(tmp_path: Path) -> None:
    table().to_parquet(str(tmp_path / "all.parquet"))
    assert built(tmp_path, size=4, mode="colour", silos=2).shape == (3, 4, 4)


def test_a_subject_at_two_silos_is_said(tmp_path: Path) -> None:
    table().to_parquet(str(tmp_path / "all.parquet"))
    with pytest.warns(FedloomWarning, match=r"^10 of 10 subjects have pictures at more than one silo: .* 'subject'"):
        built(tmp_path, columns={"silo": "label", "subject": "patient"})


def without_names(file: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"age": [1, 2]}), file)


def without_bytes(file: Path) -> None:
    cells = [{"bytes": None, "path": "/elsewhere.png"}]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    pyarrow.parquet.write_table(pyarrow.table({"image": pyarrow.array(cells, kind)}), file)


def damaged(file: Path) -> None:
    cells = [{"bytes": b"\x89PNG and no more", "path": None}]
    pyarrow.parquet.write_table(pyarrow.table({"image": cells}), file)


def torn(file: Path) -> None:
    file.write_bytes(b"PAR1, and no more")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_names, r"x\.parquet has no column of pictures; data\.columns\.image names one of age"),
        (without_bytes, r"x\.parquet, row 0 holds no picture: it must lie in the table itself"),
        (damaged, r"cannot read .*x\.parquet, row 0 as an image: it is damaged"),
        (torn, r"cannot read .*x\.parquet as a table"),
    ],
)
def test_what_cannot_be_learned_from_is_named(spoil: object, message: str, tmp_path: Path) -> None:
    assert callable(spoil)
    spoil(tmp_path / "x.parquet")
    with pytest.raises(DataError, match=message):
        built(tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"silo": "sit"}, "data.columns.silo: unknown column 'sit'; did you mean 'site'"),
        ({"sillo": "site"}, "unknown key 'columns.sillo'; did you mean 'columns.silo'"),
    ],
)
def test_columns_that_are_not_there(columns: dict[str, str], message: str, tmp_path: Path) -> None:
    table().to_parquet(str(tmp_path / "x.parquet"))
    with pytest.raises(FedloomError, match=message):
        built(tmp_path, columns=columns)


def test_a_folder_of_nothing_and_columns_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no Parquet or Arrow file to train on"):
        built(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.columns = .* is for pictures .* 'mnist-sample' has none"):
        build_federation(DataConfig(source="mnist-sample", columns=ColumnsConfig(silo="x")), Streams(0))
    with pytest.raises(DataError, match=r"data\.columns is for tables of pictures"):
        build_federation(
            DataConfig(source="image-folders", path=str(tmp_path), columns=ColumnsConfig(silo="x")), Streams(0)
        )
