"""Classes that are asked for on the command line, and labels of what is handed on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cli.conftest import Command
from fedloom.experiment import load, train
from fedloom.federation.files import load_npz
from labelled_images import CLASSES, nearest_class, picture_config, picture_federation
from labelled_vectors import labelled_config, labelled_federation

Refused = Callable[..., str]


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is told classes of images."""
    config = picture_config("class_vae", "rounds=6", "local.learning_rate=1e-2")
    return train(config, tmp_path_factory.mktemp("pictures") / "run", picture_federation()).folder.path


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(
        labelled_config("dp_cvae"), tmp_path_factory.mktemp("vectors") / "run", labelled_federation()
    ).folder.path


def test_a_grid_has_a_row_for_each_class(fedloom: Command, pictures: Path, tmp_path: Path) -> None:
    asked = ("--label", "right,left", "--label", "0", "--n", "3")
    found = json.loads(
        fedloom("sample", pictures, "--group", "day", *asked, "--out", tmp_path / "x.png", "--json").stdout
    )
    assert found["labels"] == ["right", "left"]
    margin, side = 2, 8
    image = np.asarray(Image.open(tmp_path / "x.png"))
    assert image.shape == (2 * (side + margin) + margin, 3 * (side + margin) + margin)
    generator = load(pictures).generator()
    for row, label in enumerate(found["labels"]):
        x = generator.sample(3, group="day", label=label)
        top = margin + row * (side + margin)
        tile = image[top : top + side, margin : margin + side]
        assert np.array_equal(tile, (x[0, 0] * 255).round().byte().numpy())


def test_arrays_hold_as_many_of_each_class_as_were_asked_for(fedloom: Command, vectors: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.npz"
    result = fedloom("sample", vectors, "--group", "all", "--label", "2", "--label", "ant", "--n", "15", "--out", out)
    assert result.stdout.splitlines()[0] == f"{out}: 30 records of all, 15 of each class of cat, ant"
    stored, generator = np.load(out), load(vectors).generator()
    assert stored["y_train"].tolist() == ["cat"] * 15 + ["ant"] * 15
    assert np.array_equal(stored["x_train"][15:], generator.sample(15, group="all", label="ant").numpy())
    assert load_npz(str(out)).classes == ("ant", "cat")


def test_a_class_that_a_group_never_met_is_warned_of(fedloom: Command, pictures: Path, tmp_path: Path) -> None:
    result = fedloom("sample", pictures, "--group", "day", "--label", "top", "--out", tmp_path / "x.png")
    assert result.exit_code == 0
    assert result.stderr == "Warning: group 'day' learned from no record of class 'top'\n"


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("rigth", "unknown class 'rigth'; did you mean 'right'? (allowed: left, right, top)"),
        ("3", "unknown class '3' (allowed: left, right, top)"),
        ("-1", "unknown class '-1' (allowed: left, right, top)"),
        ("left,", "unknown class '' (allowed: left, right, top)"),
    ],
)
def test_a_class_that_there_is_not_is_named(refused: Refused, pictures: Path, label: str, words: str) -> None:
    assert words in refused("sample", pictures, "--group", "day", f"--label={label}")


def test_a_method_without_classes_is_asked_for_none(refused: Refused, finished: Path) -> None:
    sentence = refused("sample", finished, "--group", "mnist", "--label", "3")
    assert "method 'fissionvae' learns without classes, so none can be asked for" in sentence


# Data sets


def made(fedloom: Command, run: Path, out: Path, *arguments: str) -> dict[str, dict[str, int]]:
    """What a data set holds of each group and class."""
    result = fedloom("synthesize", run, "--out", out, *arguments, "--accept-risk", "--json")
    assert result.exit_code == 0, result.output
    counts: dict[str, dict[str, int]] = json.loads(result.stdout)["counts"]
    return counts


@pytest.mark.parametrize(
    ("asked", "counts"),
    [
        ((), {"day": {"left": 30, "right": 10}, "night": {"right": 30, "top": 10}}),
        (("--labels", "balanced"), {"day": {"left": 20, "right": 20}, "night": {"right": 20, "top": 20}}),
        (("--labels", "right=3,2=1"), {"day": {"right": 40}, "night": {"right": 30, "top": 10}}),
        (("--labels", "left=0.5"), {"day": {"left": 80}}),
    ],
    ids=str,
)
def test_labels_follow_what_is_known_or_asked_for(
    fedloom: Command, pictures: Path, tmp_path: Path, asked: tuple[str, ...], counts: dict[str, dict[str, int]]
) -> None:
    assert made(fedloom, pictures, tmp_path / "out", "--n", "80", "--format", "npz", *asked) == counts
    stored = np.load(tmp_path / "out" / "data.npz")
    for group, of_class in counts.items():
        labels = stored["y_train"][stored["group_train"] == group].tolist()
        assert {label: labels.count(label) for label in set(labels)} == of_class


def test_a_folder_has_one_for_each_class_and_a_line_for_each_image(
    fedloom: Command, pictures: Path, tmp_path: Path
) -> None:
    made(fedloom, pictures, tmp_path / "out", "--n", "40")
    data = tmp_path / "out" / "data"
    rows = [json.loads(line) for line in (data / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 40
    for row in rows:
        assert row["file_name"].split("/")[:2] == [row["group"], row["label"]]
        x = torch.from_numpy(np.asarray(Image.open(data / row["file_name"])).copy()).float().reshape(1, 1, 8, 8) / 255
        assert CLASSES[nearest_class(x, ("day", "night").index(row["group"]))] == row["label"]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ("evenly", "unknown choice of labels 'evenly' (allowed: CLASS=SHARE,..., balanced, prior)"),
        ("middle=1", "unknown class 'middle'"),
        ("left=some", "'left=some' is not of the form CLASS=SHARE with a number"),
        ("left=0", "must give shares of at least 0, and one above it"),
        ("left=2,right=-1", "must give shares of at least 0, and one above it"),
    ],
)
def test_shares_that_are_none_are_refused(refused: Refused, pictures: Path, labels: str, words: str) -> None:
    sentence = refused("synthesize", pictures, "--n", "10", "--out", "out", "--labels", labels, "--accept-risk")
    assert words in sentence
