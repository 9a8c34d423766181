"""Synthetic data sets: files, cards, manifests."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from fedloom.errors import ConfigError, MissingExtraError
from fedloom.experiment import Run
from fedloom.federation.files import load_npz
from fedloom.release import formats, synthesis
from fedloom.release.formats import FolderWriter, NpzWriter, ParquetWriter, RecordKind
from fedloom.release.release_folder import file_names
from fedloom.release.synthesis import SynthesisOrder, apportioned, counts_of, synthesize
from fedloom.streams import Streams
from support import names_in


def made(run: Run, out: Path, records: int, form: str, labels: str = "", seed: int = 0) -> dict[str, Any]:
    """A data set, and its manifest."""
    synthesize(run, out, SynthesisOrder(records=records, form=form, labels=labels, seed=seed), accept_risk=True)
    manifest: dict[str, Any] = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    return manifest


def pixels(run: Run, group: str, count: int, seed: int = 0) -> np.ndarray:
    """What the generator gives for the first chunk of a group, as stored."""
    x = run.sample(count, group=group, seed=Streams(seed).torch_seed("synthesize/", silo=0))
    return (x * 255).round().byte().numpy()


def test_a_folder_of_images_loads_in_datasets_with_its_groups(images: Run, tmp_path: Path, offline: Path) -> None:
    made(images, tmp_path / "out", 5, "folder")
    table = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(offline))["train"]
    assert list(table["group"]) == ["mnist"] * 3 + ["fashion-mnist"] * 2
    assert names_in(tmp_path / "out" / "data") == ["fashion-mnist", "metadata.jsonl", "mnist"]
    found = np.stack([np.asarray(image) for image in table["image"]])
    assert np.array_equal(found[:3], pixels(images, "mnist", 3)[:, 0])
    assert np.array_equal(found[3:], pixels(images, "fashion-mnist", 2)[:, 0])


def test_a_table_of_images_loads_in_datasets(images: Run, tmp_path: Path, offline: Path) -> None:
    made(images, tmp_path / "out", 5, "parquet")
    table = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(offline))["train"]
    assert table.features["group"].names == ["mnist", "fashion-mnist"]
    assert list(table["group"]) == [0, 0, 0, 1, 1]
    assert np.array_equal(np.asarray(table[4]["image"]), pixels(images, "fashion-mnist", 2)[1, 0])


def test_a_table_of_labelled_vectors_loads_in_datasets(private: Run, tmp_path: Path, offline: Path) -> None:
    manifest = made(private, tmp_path / "out", 8, "parquet", "balanced")
    assert manifest["counts"] == {"all": {"ant": 3, "bee": 3, "cat": 2}}
    table = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(offline))["train"]
    assert table.features["label"].names == ["ant", "bee", "cat"]
    assert list(table["label"]) == [0, 0, 0, 1, 1, 1, 2, 2]
    seed = Streams(0).torch_seed("synthesize/bee", silo=0)
    expected = private.sample(3, group="all", label="bee", seed=seed)
    torch.testing.assert_close(torch.tensor(table["values"][3:6]), expected, rtol=0, atol=0)


def test_an_npz_file_is_read_back_by_fedloom(private: Run, images: Run, tmp_path: Path) -> None:
    made(private, tmp_path / "vectors", 30, "npz", "balanced")
    back = load_npz(str(tmp_path / "vectors" / "data.npz"))
    assert (back.train.shape, back.classes) == ((6,), ("ant", "bee", "cat"))
    assert torch.bincount(torch.cat([back.train.y, back.test.y])).tolist() == [10, 10, 10]
    made(images, tmp_path / "images", 30, "npz")
    stored = np.load(tmp_path / "images" / "data.npz")
    assert (stored["x_train"].dtype, stored["x_train"].shape) == (np.uint8, (30, 1, 28, 28))
    assert "y_train" not in stored
    assert load_npz(str(tmp_path / "images" / "data.npz")).groups == ("fashion-mnist", "mnist")


@pytest.mark.parametrize("form", ["folder", "npz", "parquet"])
def test_checksums_hold_and_the_seed_alone_decides(form: str, images: Run, tmp_path: Path) -> None:
    first = made(images, tmp_path / "a", 4, form)
    for name, about in first["files"].items():
        data = (tmp_path / "a" / name).read_bytes()
        assert (len(data), sha256(data).hexdigest()) == (about["bytes"], about["sha256"])
    on_disk = {p.relative_to(tmp_path / "a").as_posix() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert on_disk == {*first["files"], "manifest.json"}
    assert made(images, tmp_path / "b", 4, form) == first
    assert made(images, tmp_path / "c", 4, form, seed=1)["files"] != first["files"]


def test_a_record_does_not_depend_on_how_many_there_are(
    images: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthesis, "CHUNK", 3)
    heard: list[tuple[int, str]] = []
    order = SynthesisOrder(records=14, form="npz")
    synthesize(images, tmp_path / "many", order, accept_risk=True, progress=lambda *news: heard.append(news))
    synthesize(images, tmp_path / "few", replace(order, records=8), accept_risk=True)
    many, few = (np.load(tmp_path / name / "data.npz")["x_train"] for name in ("many", "few"))
    assert np.array_equal(many[:4], few[:4])
    assert np.array_equal(many[7:11], few[4:])
    assert len(np.unique(many, axis=0)) == 14
    assert heard == [(3, "mnist"), (6, "mnist"), (7, "mnist")] + [(n, "fashion-mnist") for n in (10, 13, 14)]


def test_labels_follow_the_noisy_counts_of_the_run(private: Run) -> None:
    generator = private.generator()
    shares = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    generator.server.memory["label-shares"] = shares
    for labels in ("prior", ""):
        order = SynthesisOrder(records=10, form="npz", labels=labels)
        assert counts_of(generator, "z", order) == {"all": {"ant": 5, "bee": 3, "cat": 2}}


@pytest.mark.parametrize(
    ("total", "shares", "counts"),
    [(7, [1, 1, 1], [3, 2, 2]), (10, [0.5, 0.3, 0.2], [5, 3, 2]), (3, [0.9, 0.1], [3, 0]), (1, [1, 1], [1, 0])],
)
def test_counts_add_up(total: int, shares: list[float], counts: list[int]) -> None:
    assert apportioned(total, torch.tensor(shares)) == counts


@pytest.mark.parametrize("shape", [(6,), (2, 5, 5)], ids=str)
def test_what_is_no_picture_is_refused_as_a_folder(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"folder holds images of 1 or 3 channels, .* use npz, parquet or csv"):
        FolderWriter(tmp_path, RecordKind(shape, ("all",), ()))


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_images_of_several_channels_keep_every_pixel(channels: int, tmp_path: Path, offline: Path) -> None:
    x = torch.rand(3, channels, 5, 4, generator=torch.Generator().manual_seed(1))
    kind = RecordKind((channels, 5, 4), ("all",), ())
    stored = (x * 255).round().byte().numpy()
    for make in (NpzWriter, ParquetWriter):
        writer = make(tmp_path, kind)
        writer.add(x, "all", "")
        writer.close()
    assert np.array_equal(np.load(tmp_path / "data.npz")["x_train"], stored)
    files = str(tmp_path / "data" / "*.parquet")
    table = datasets.load_dataset("parquet", data_files=files, cache_dir=str(offline))["train"]
    if channels == 2:
        torch.testing.assert_close(torch.tensor(table["values"][:]), x.flatten(1), rtol=0, atol=0)
    else:
        shown = np.stack([np.atleast_3d(np.asarray(image)) for image in table["image"]])
        assert np.array_equal(np.moveaxis(shown, 3, 1), stored)


def test_names_of_groups_and_classes_cannot_leave_the_folder() -> None:
    names = ("a/b", "a_b", "A_B", "../up", "", "test", "è" * 100)
    found = file_names(names)
    assert len({name.casefold() for name in found.values()}) == len(names)
    assert found["../up"] == "___up"
    assert all(set(name) & set("/.\\") == set() and 0 < len(name) < 80 for name in found.values())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"'pyarrow'; install it with: pip install 'fedloom\[release\]'"):
        formats.ParquetWriter(tmp_path, RecordKind((6,), ("all",), ()))
    assert names_in(tmp_path) == []
