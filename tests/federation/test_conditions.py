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
