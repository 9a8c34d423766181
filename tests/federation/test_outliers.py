from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.config import DataConfig
from fedloom.errors import DataError, FedloomError
from fedloom.federation.building import build_federation, describe
from fedloom.federation.outliers import OUTLIER, is_outlier
from fedloom.federation.records import Federation
from fedloom.federation.sources import SOURCES
from fedloom.settings import parse
from fedloom.streams import Streams

OUTLIERS = {"source": "fashion-mnist-sample", "share": 0.05, "silos": ["silo-0"]}


def build(outliers: dict[str, object], seed: int = 0, **settings: object) -> Federation:
    """MNIST in five silos of two classes, 1,200 records each."""
    data = {"source": "mnist-sample", "partition": "classes", "silos": 5, **settings, "outliers": outliers}
    return build_federation(parse(DataConfig, data, "data"), Streams(seed))


def rows(x: torch.Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in x}


def test_outliers_come_on_top_of_the_silos_own_records_under_a_label_of_their_own() -> None:
    plain, spoiled = build({}), build(OUTLIERS)
    assert [len(silo) for silo in spoiled.silos] == [1260, 1200, 1200, 1200, 1200]
    assert spoiled.classes == (*plain.classes, OUTLIER)
    assert describe(spoiled)[0].classes == {"mnist/0": 600, "mnist/1": 600, OUTLIER: 60}
    first = spoiled.silos[0].train
    marked = is_outlier(spoiled, first)
    assert torch.equal(first.x[~marked], plain.silos[0].train.x)
    fashion = SOURCES["fashion-mnist-sample"].load("")
    assert rows(first.x[marked]) <= rows(fashion.train.x)
    assert not is_outlier(spoiled, spoiled.silos[1].train).any()
    assert not is_outlier(plain, plain.silos[0].train).any()


def test_held_out_records_have_no_outliers_and_unseen_ones_stand_beside_them() -> None:
    plain, spoiled = build({}), build(OUTLIERS)
    assert torch.equal(plain.test.x, spoiled.test.x)
    assert not is_outlier(spoiled, spoiled.test).any()
    assert spoiled.unseen_outliers is not None
    assert is_outlier(spoiled, spoiled.unseen_outliers).all()
    inserted = spoiled.silos[0].train
    assert not rows(spoiled.unseen_outliers.x) & rows(inserted.x[is_outlier(spoiled, inserted)])
    assert plain.unseen_outliers is None


def test_no_outlier_is_put_in_twice_and_the_seed_decides() -> None:
    two = {**OUTLIERS, "silos": ["silo-1", "silo-3"], "share": 0.5}
    same, again, other = build(two), build(two), build(two, seed=1)
    assert same.digest == again.digest != other.digest
    parts = [silo.train.x[is_outlier(same, silo.train)] for silo in same.silos]
    assert [len(part) for part in parts] == [0, 600, 0, 600, 0]
    assert len(rows(torch.cat(parts))) == 1200


def test_a_share_of_zero_puts_none_in_but_has_them_at_hand() -> None:
    control = build({"source": "fashion-mnist-sample", "share": 0.0})
    assert [len(silo) for silo in control.silos] == [1200] * 5
    assert control.unseen_outliers is not None


def test_a_group_of_a_source_and_the_groups_of_a_mixed_silo() -> None:
    """Outliers of one group only; in a silo of two groups they are spread over both, as its own records are."""
    outliers = {"source": "mixed-mnist-sample", "group": "fashion-mnist", "silos": ["silo-0"], "share": 1.0}
    federation = build(outliers, source="mixed-mnist-sample", partition="iid", silos=10, records_per_silo=100)
    first = federation.silos[0].train
    inserted = first.take(torch.nonzero(is_outlier(federation, first)).flatten())
    assert torch.bincount(inserted.group).tolist() == torch.bincount(first.group[:100]).tolist()
    assert rows(inserted.x) <= rows(SOURCES["fashion-mnist-sample"].load("").train.x)


def test_pooling_keeps_them() -> None:
    pooled = build(OUTLIERS, layout="centralised")
    assert int(is_outlier(pooled, pooled.silos[0].train).sum()) == 60
    assert pooled.unseen_outliers is not None


def test_unlabelled_records_get_them_too(tmp_path: Path) -> None:
    fashion = SOURCES["fashion-mnist-sample"].load("")
    np.savez(tmp_path / "own.npz", x_train=fashion.train.x[:50].numpy())
    federation = build(OUTLIERS, source="npz", path=str(tmp_path / "own.npz"), partition="iid", silos=1)
    assert federation.classes == (OUTLIER,)
    assert int(is_outlier(federation, federation.silos[0].train).sum()) == 2  # 5 % of 45


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"source": "fashion"}, "data.outliers.source: unknown source 'fashion'"),
        ({"silos": []}, "data.outliers.silos is empty; name the silos that get them, such as 'silo-0'"),
        ({"silos": ["silo-9"]}, "data.outliers.silos: unknown silo 'silo-9'"),
        ({"group": "mnist"}, r"data.outliers.group: unknown group 'mnist' \(allowed: fashion-mnist\)"),
        ({"share": -0.1}, "data.outliers.share = -0.1 must be at least 0 and at most 1"),
        ({"share": 1.5}, "data.outliers.share = 1.5 must be at least 0 and at most 1"),
        ({"shar": 0.1}, "unknown key 'data.outliers.shar'"),
    ],
)
def test_mistakes_are_named(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(FedloomError, match=sentence):
        build({**OUTLIERS, **changes})


def test_outliers_of_another_modality_are_refused(tmp_path: Path) -> None:
    """Equal in shape and dtype, and still other records."""
    np.savez(tmp_path / "other.npz", x_train=np.zeros((50, 1, 28, 28), np.uint8), modality="vector")
    with pytest.raises(DataError, match=r"^data.outliers.source = 'npz' has vectors, but the silos hold images$"):
        build({**OUTLIERS, "source": "npz", "path": str(tmp_path / "other.npz")})


@pytest.mark.parametrize(
    ("side", "sentence"),
    [
        (28, "data.outliers.share = 0.05 asks for 60 outliers, but data.outliers.source = 'npz' has 45"),
        (16, r"'npz' has torch.uint8 records of shape \(1, 16, 16\), but those of the silos are torch.uint8 of shape"),
    ],
)
def test_sources_that_do_not_fit_are_named(tmp_path: Path, side: int, sentence: str) -> None:
    np.savez(tmp_path / "other.npz", x_train=np.zeros((50, side, side), np.uint8))
    with pytest.raises(DataError, match=sentence):
        build({**OUTLIERS, "source": "npz", "path": str(tmp_path / "other.npz")})
