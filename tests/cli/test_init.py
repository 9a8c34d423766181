"""Five questions, and a run.toml that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from cli.conftest import Command
from fedloom.cli import app
from fedloom.cli.beginning import FiveAnswers, FoundData, FoundKind, Place, base_of
from fedloom.config import load_config
from fedloom.presets import preset_names

FEW = ("rounds=1", "local.steps=1", "local.warmup=0", "evaluation.metrics=[]", "evaluation.samples=20")


def pictures(folder: Path) -> Path:
    """Two silos' of unequal size."""
    for silo in ("ct__north", "mri__south"):
        (folder / silo).mkdir(parents=True)
        for number in range(12):
            pixels = np.random.default_rng(number).integers(0, 256, (30 + number, 40), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / silo / f"{number}.png")
    return folder


def vectors(folder: Path) -> Path:
    x = np.random.default_rng(0).normal(size=(80, 6)).astype(np.float32)
    np.savez(folder / "vectors.npz", x_train=x, y_train=np.tile([0, 1], 40), owner_train=np.repeat(["a", "b"], 40))
    return folder / "vectors.npz"


def rows(folder: Path) -> Path:
    (folder / "tables").mkdir()
    columns = {"sex": '["f", "m"]', "ill": '["n", "y"]'}
    schema = (f'[columns.{name}]\nkind = "categorical"\nlevels = {levels}\n' for name, levels in columns.items())
    (folder / "tables" / "schema.toml").write_text("".join(schema))
    for silo in ("a", "b"):
        (folder / "tables" / f"{silo}.csv").write_text("sex,ill\n" + "f,n\nm,y\n" * 20)
    return folder / "tables"


@pytest.mark.parametrize(
    ("make", "few"), [(pictures, (*FEW, "method.widths=[4, 8]", "method.steps=1")), (vectors, FEW), (rows, FEW)]
)
def test_what_it_writes_runs_as_it_is(
    make: Callable[[Path], Path], few: tuple[str, ...], fedloom: Command, tmp_path: Path
) -> None:
    data, out = make(tmp_path / "data") if make is pictures else make(tmp_path), tmp_path / "mine.toml"
    result = fedloom("init", "--data", data, "--out", out, "--yes")
    assert result.exit_code == 0, result.output
    assert f"fedloom run {out}" in result.stdout
    assert load_config(out).data.path == str(data)
    assert load_config(out).name == "mine"
    run = fedloom("run", out, *few, "--out", tmp_path / "run")
    assert run.exit_code == 0, run.output


def test_answers_are_asked_for_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = pictures(tmp_path / "data")
    result = CliRunner().invoke(app, ["init"], input=f"{data}\ny\nn\n2.5\nhere\n")
    assert result.exit_code == 0, result.output
    config = load_config(tmp_path / "run.toml")
    assert (config.data.source, config.data.size) == ("image-folders", 28)
    assert (config.privacy.mechanism, config.privacy.epsilon) == ("dp-sgd", 2.5)
    text = (tmp_path / "run.toml").read_text(encoding="utf-8")
    assert "epsilon = 2.5  # of each silo, for the whole run" in text
    assert "GROUP__SILO" in text
    assert "24 pictures at 2 silos" in result.output


def test_no_is_an_answer(fedloom: Command, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    fedloom("init", "--data", rows(tmp_path), "--epsilon", "0", "--out", out, "--yes")
    assert load_config(out).privacy.mechanism == "none"


def test_an_option_is_not_asked_for(tmp_path: Path) -> None:
    options = ["--data", str(vectors(tmp_path)), "--no-groups", "--epsilon", "1", "--out", str(tmp_path / "mine.toml")]
    result = CliRunner().invoke(app, ["init", *options], input="y\nhere\n")
    assert result.exit_code == 0, result.output
    assert [number for number in range(1, 6) if f"{number}. " in result.output] == [3, 5]
    assert load_config(tmp_path / "mine.toml").method.name == "refined_moments"


@pytest.mark.parametrize(
    ("kind", "epsilon", "place", "base"),
    [
        (FoundKind.VECTORS, 0.0, Place.HERE, "embeddings/labelled"),
        (FoundKind.VECTORS, 1.0, Place.HERE, "embeddings/private"),
        (FoundKind.VECTORS, 1.0, Place.MACHINES, "federation/embeddings"),
        (FoundKind.IMAGES, 1.0, Place.MACHINES, "federation/images"),
        (FoundKind.IMAGES, 10.0, Place.HERE, "images/private"),
        (FoundKind.ROWS, 1.0, Place.MACHINES, "federation/tables"),
        (FoundKind.ROWS, 0.0, Place.HERE, "tables/own"),
    ],
)
def test_the_preset_fits_what_people_have(kind: FoundKind, epsilon: float, place: Place, base: str) -> None:
    found = FoundData(kind, {"source": ("", "")}, labelled=True)
    assert base_of(FiveAnswers(found, groups=False, labels=True, epsilon=epsilon, place=place)) == base
    assert base in preset_names()


def test_what_is_not_there_or_lacks_a_schema_is_said(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "there is no file or folder 'nowhere', and unknown data set" in refused("init", "--data", "nowhere", "--yes")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.csv").write_text("sex\nf\n")
    sentence = refused("init", "--data", tmp_path / "plain", "--yes")
    assert f"'fedloom data schema {tmp_path / 'plain' / 'a.csv'} --out" in sentence
    (tmp_path / "run.toml").write_text("mine")
    assert "exists already" in refused("init", "--yes")
    assert (tmp_path / "run.toml").read_text() == "mine"
