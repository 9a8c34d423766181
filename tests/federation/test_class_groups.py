"""Classes that are groups as well."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.config import Config, load_config
from fedloom.errors import ConfigError
from fedloom.experiment import train
from fedloom.federation.building import build_federation
from fedloom.settings import override, parse
from fedloom.streams import Streams
from support import tiny_config


def folder_of_classes(root: Path, count: int = 12) -> Path:
    """One folder of pictures a class, as CIFAR-10 is often kept: red ones and blue ones."""
    generator = np.random.default_rng(0)
    for name, channel in (("red", 0), ("blue", 2)):
        folder = root / "pictures" / name
        folder.mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 60, (8, 8, 3), dtype=np.uint8)
            pixels[..., channel] += 180
            Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return root


def config_of(path: Path, *overrides: str) -> Config:
    return tiny_config(
        "data.source=image-folders",
        f"data.path={path}",
        "data.groups=class",
        "data.partition=groups",
        "data.records_per_silo=0",
        *overrides,
    )


def test_each_class_is_a_group_with_silos_of_its_own(tmp_path: Path) -> None:
    federation = build_federation(config_of(folder_of_classes(tmp_path)).data, Streams(1))
    assert federation.groups == federation.classes == ("blue", "red")
    assert [silo.name for silo in federation.silos] == ["blue-0", "blue-1", "red-0", "red-1"]
    for table in (federation.test, *(silo.train for silo in federation.silos)):
        assert torch.equal(table.y, table.group)
    for silo in federation.silos:
        brightest = silo.train.values.mean(dim=(2, 3)).argmax(dim=1)
        assert set(brightest.tolist()) == {{"blue": 2, "red": 0}[silo.name.partition("-")[0]]}


def test_a_group_that_is_a_class_makes_no_other(tmp_path: Path) -> None:
    run = train(config_of(folder_of_classes(tmp_path), "method.name=class_vae", "rounds=1"), tmp_path / "run")
    generator = run.generator()
    assert [generator.label_shares_of(group).tolist() for group in ("blue", "red")] == [[1.0, 0.0], [0.0, 1.0]]


def test_records_without_classes_have_none_to_be_groups(tmp_path: Path) -> None:
    root = folder_of_classes(tmp_path) / "pictures"
    with pytest.raises(ConfigError, match=r"data.groups = 'class' needs a class for every record, which some of"):
        build_federation(config_of(root).data, Streams(1))


def test_an_experiment_from_before_is_the_same(tmp_path: Path) -> None:
    """Whoever leaves groups to the source has the digest that earlier versions gave."""
    config = load_config("demo")
    tree = config.to_mapping()
    del tree["data"]["groups"]
    assert parse(Config, tree).digest() == config.digest()
    assert parse(Config, override(tree, ["data.groups=class"])).digest() != config.digest()
