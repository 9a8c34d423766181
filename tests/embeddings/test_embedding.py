"""``fedloom embed``: what a file of embeddings holds, and that nothing is extracted twice."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom import embedding
from fedloom.backbones.base import Backbone
from fedloom.embedding import Preparation, embed
from fedloom.errors import ConfigError, DataError
from fedloom.federation.arrays import Examples, assemble
from fedloom.federation.records import Dataset
from fedloom.federation.sources import SOURCES


class Means(Backbone):
    """Mean, maximum and spread of an image; counts what it was asked about and can break off."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__("means", 3, "cpu", batch_size=4)
        self.extracted, self.most = 0, most

    def extract(self, images: Tensor) -> Tensor:
        self.extracted += len(images)
        if self.extracted > self.most:
            raise KeyboardInterrupt
        flat = images.flatten(1)
        return torch.stack([flat.mean(1), flat.amax(1), flat.std(1)], dim=1)


@pytest.fixture
def dataset() -> Dataset:
    images = torch.randint(0, 256, (24, 1, 3, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    number = np.arange(24)
    table = Examples(
        images,
        y=np.array(["cat", "dog", "ant"])[number % 3],
        group=np.array(["ct", "mr"])[number % 2],
        owner=np.array(["a", "b", "c"])[number // 8],
        subject=number // 2,
        attributes={"sex": np.array(["f", "m", ""])[number % 3], "scanner": number % 4},
    )
    return assemble("pictures", table.rows(number[:20]), table.rows(number[20:]))


def test_embeddings_come_back_with_all_that_is_known_of_them(dataset: Dataset, tmp_path: Path) -> None:
    about = embed(dataset, Means(), Preparation(scaling="none"), tmp_path / "out.npz", tmp_path / "cache")
    assert about["dimension"] == 3
    with np.load(tmp_path / "out.npz", allow_pickle=False) as stored:
        assert json.loads(str(stored["about"])) == about
    again = SOURCES["embeddings"].load(str(tmp_path / "out.npz"))
    torch.testing.assert_close(again.train.x, Means().features(dataset.train.x.float() / 255))
    assert (again.classes, again.groups, again.owners) == (dataset.classes, dataset.groups, dataset.owners)
    assert again.attributes == ("scanner=0", "scanner=1", "scanner=2", "scanner=3", "sex=f", "sex=m")
    assert torch.equal(again.owner, dataset.owner)  # type: ignore[arg-type]
    for mine, theirs in ((again.train, dataset.train), (again.test, dataset.test)):
        assert torch.equal(mine.y, theirs.y)
        assert torch.equal(mine.group, theirs.group)
        assert torch.equal(mine.subject, theirs.subject)  # type: ignore[arg-type]
        assert torch.equal(mine.attributes, theirs.attributes)  # type: ignore[arg-type]
    assert dataset.test.attributes.sum(1).tolist() == [1.0, 2.0, 2.0, 1.0]  # type: ignore[union-attr]


def test_an_extraction_that_was_stopped_goes_on(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "PART", 8)
    plain, heard = Preparation(), []
    with pytest.raises(KeyboardInterrupt):
        embed(dataset, Means(most=8), plain, tmp_path / "out.npz", tmp_path / "cache")
    assert not (tmp_path / "out.npz").exists()
    later = Means()
    embed(dataset, later, plain, tmp_path / "out.npz", tmp_path / "cache", lambda *done: heard.append(done))
    assert later.extracted == 24 - 8
    assert heard == [(8, 24), (16, 24), (20, 24), (24, 24)]
    other = Means()
    embed(dataset, other, replace(plain, projection="random", dimension=2), tmp_path / "2.npz", tmp_path / "cache")
    assert other.extracted == 0


def test_shortened_then_scaled(dataset: Dataset, tmp_path: Path) -> None:
    how = Preparation(projection="random", dimension=2, seed=4, storage="float16")
    embed(dataset, Means(), how, tmp_path / "out.npz", tmp_path / "cache")
    with np.load(tmp_path / "out.npz") as stored:
        assert stored["x_train"].dtype == np.float16
        assert stored["x_test"].shape == (4, 2)
        np.testing.assert_allclose(np.linalg.norm(stored["x_train"].astype(float), axis=1), 1.0, atol=1e-3)


class Broken(Means):
    def extract(self, images: Tensor) -> Tensor:
        return torch.full((len(images), 3), torch.nan)


@pytest.mark.parametrize(
    ("settings", "out", "backbone", "error", "sentence"),
    [
        ({"scaling": "l3"}, "a.npz", Means, ConfigError, "unknown scaling 'l3'"),
        ({"storage": "float8"}, "a.npz", Means, ConfigError, "unknown storage 'float8'"),
        ({"projection": "head"}, "a.npz", Means, ConfigError, "'means' has no class head"),
        ({"projection": "random"}, "a.npz", Means, ConfigError, "256 directions were asked for"),
        ({}, "a.csv", Means, ConfigError, "a.csv' must end in .npz"),
        ({}, "no/a.npz", Means, ConfigError, "the folder of '.*no/a.npz' does not exist"),
        ({}, "a.npz", Broken, DataError, "'means' gave features that are not finite for 'pictures'"),
    ],
)
def test_mistakes_are_named(
    dataset: Dataset,
    tmp_path: Path,
    settings: dict[str, str],
    out: str,
    backbone: type[Backbone],
    error: type[Exception],
    sentence: str,
) -> None:
    with pytest.raises(error, match=sentence):
        embed(dataset, backbone(), Preparation(**settings), tmp_path / out, tmp_path / "cache")  # type: ignore
    assert not list(tmp_path.glob("*.npz"))
