from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

Command = Callable[..., Result]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    x = np.random.default_rng(0).integers(0, 256, (12, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "pictures.npz", x_train=x, y_train=np.arange(12) % 2, x_test=x[:4], y_test=np.arange(4) % 2)
    return tmp_path / "pictures.npz"


def test_embed_says_what_it_wrote(
    fedloom: Command, pictures: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out.npz"
    common = ("embed", pictures, "--backbone", "pixels", "--out", out)
    assert fedloom(*common).stdout == f"{out}: 12 + 4 vectors of length 16, pixels\n"
    found = json.loads(fedloom(*common, "--projection", "random", "--dimension", "5", "--json").stdout)
    assert (found["dimension"], found["scaling"], found["projection"]) == (5, "l2", "random")
    with np.load(out) as stored:
        assert stored["x_train"].shape == (12, 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mnits", "--out", "a.npz"], "'mnits' is neither a file or folder nor a data set"),
        (["mnist-sample", "--backbone", "pixel", "--out", "a.npz"], "unknown backbone 'pixel'; did you mean 'pixels'"),
        (["mnist-sample", "--backbone", "pixels", "--out", "a.txt"], "'a.txt' must end in .npz"),
        (["mnist-sample", "--backbone", "pixels", "--device", "gpu", "--out", "a.npz"], "device = 'gpu' is not there"),
        (["camelyon17", "--backbone", "pixels", "--out", "a.npz"], "must name the WILDS folder"),
    ],
)
def test_mistakes_are_named(refused: Callable[..., str], arguments: list[str], words: str) -> None:
    assert words in refused("embed", *arguments)
