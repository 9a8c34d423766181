"""Classes under a condition, and records that silos keep aside for choices of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.config import DataConfig
from fedloom.errors import ConfigError, DataError
from fedloom.federation.building import build_federation
from fedloom.federation.conditions import plain_classes
from fedloom.federation.records import Federation
from fedloom.streams import Streams


def build(path: Path, sex: object = None, **settings: object) -> Federation:
    x = np.arange(40, dtype=np.float32)[:, None] * np.ones((1, 3), dtype=np.float32)
    column = np.where(np.arange(40) % 5 < 2, "f", "m") if sex is None else sex
    table = {"x": x, "y": np.array(["cat", "dog"])[np.arange(40) % 2], "attribute_sex": column}
    arrays = {f"{name}_{split}": values for name, values in table.items() for split in ("train", "test")}
    np.savez(path / "data.npz", **arrays)  # type: ignore[arg-type]
    return build_federation(
        DataConfig(source="npz", path=str(path / "data.npz"), partition="iid", **settings), Streams(3)
    )  # type: ignore[arg-type]


def test_each_value_makes_a_class_of_every_class(tmp_path: Path) -> None:
    federation = build(tmp_path, silos=1, condition="sex")
    assert federation.classes == ("cat|sex=f", "cat|sex=m", "dog|sex=f", "dog|sex=m")
    number = federation.test.x[:, 0].long()
    assert torch.equal(federation.test.y, 2 * (number % 2) + (number % 5 >= 2).long())
    assert plain_classes(federation.classes) == (("cat", "dog"), (0, 0, 1, 1))
    assert plain_classes(("cat", "dog")) == (("cat", "dog"), (0, 1))


def test_a_condition_that_nobody_knows_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.condition: unknown attribute 'age'"):
        build(tmp_path, silos=1, condition="age")
    with pytest.raises(ConfigError, match="'sex', but some records do not say"):
        build(tmp_path, sex=np.array([""] + ["f"] * 39), silos=1, condition="sex")


@pytest.mark.parametrize(
    ("settings", "home"),
    [({"partition": "natural"}, [0, 1, -1]), ({"partition": "auto"}, [0, 1, -1]), ({"partition": "iid"}, None)],
)
def test_held_out_records_stay_with_the_hospital_that_held_them_out(
    tmp_path: Path, settings: dict[str, str], home: list[int] | None
) -> None:
    """Hospital c trains on nothing, so that none of the silos is it; other silos than the hospitals have no home."""
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    owners = {"owner_train": np.array(list("aaaabbbb")), "owner_test": np.array(list("abc"))}
    np.savez(
        tmp_path / "data.npz", x_train=x, x_test=x[:3], y_train=np.arange(8) % 2, y_test=np.arange(3) % 2, **owners
    )
    config = DataConfig(source="npz", path=str(tmp_path / "data.npz"), silos=2, **settings)  # type: ignore[arg-type]
    federation = build_federation(config, Streams(3))
    found = federation.test.home
    assert (found if found is None else found.tolist()) == home
    assert federation.centralised().test.home is None
    if found is not None:
        kept = federation.test.take(torch.tensor([2, 0])).home
        assert kept is not None
        assert kept.tolist() == [-1, 0]


def test_a_tenth_of_each_hospital_is_held_out_where_nothing_is_said(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x_train=x, y_train=np.arange(50) % 2, owner_train=np.array(["a"] * 30 + ["b"] * 20))
    federation = build_federation(DataConfig(source="npz", path=str(tmp_path / "data.npz")), Streams(3))
    assert federation.test.home is not None
    assert torch.bincount(federation.test.home).tolist() == [3, 2]
    for number, rows in ((0, x[:30]), (1, x[30:])):
        held = federation.test.x[federation.test.home == number].numpy()
        assert all((row == rows).all(axis=1).any() for row in held)


def test_what_is_kept_aside_is_never_trained_on_and_nothing_is_lost(tmp_path: Path) -> None:
    federation = build(tmp_path, silos=4, validation=0.2)
    values = []
    for silo in federation.silos:
        assert silo.validation is not None
        assert (len(silo), len(silo.validation)) == (8, 2)
        values += [*silo.train.x[:, 0].tolist(), *silo.validation.x[:, 0].tolist()]
    assert sorted(values) == list(range(40))
    pooled = federation.centralised().silos[0]
    assert pooled.validation is not None
    assert (len(pooled), len(pooled.validation)) == (32, 8)
    assert federation.digest != build(tmp_path, silos=4).digest


def test_a_silo_that_would_have_nothing_left_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.validation = 0.2 leaves silo 'silo-0' none of its 1 records"):
        build(tmp_path, silos=40, validation=0.2)
