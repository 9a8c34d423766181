"""What is laid out for a hub is a repository as its own tools expect one, checked without asking it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import datasets
import pytest
from huggingface_hub import DatasetCard, ModelCard

from fedloom.experiment import Run, train
from fedloom.release.export import export, load_generators
from fedloom.release.synthesis import SynthesisOrder, synthesize
from support import tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny_config("rounds=1"), tmp_path_factory.mktemp("hub") / "run")


def committed(folder: Path) -> dict[str, str]:
    """A local repository of the folder: each file, and what git would do with it."""
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    places = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    files = [place.as_posix() for place in places if place.parts[0] != ".git"]
    told = subprocess.run([*git, "check-attr", "filter", "--", *files], check=True, capture_output=True, text=True)
    return {line.split(": ")[0]: line.split(": ")[2] for line in told.stdout.splitlines()}


def test_generators_are_a_repository_of_a_model(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "out", "safetensors", licence="mit", accept_risk=True, to_hub=True)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.library_name) == ("mit", "fedloom")
    found = committed(tmp_path / "out")
    assert {name for name, filter in found.items() if filter == "lfs"} == {"generators.safetensors"}
    listed = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))["files"]
    assert set(listed) == set(found) - {"manifest.json"}
    assert load_generators(tmp_path / "out").sample(2, group="mnist").shape == (2, 1, 28, 28)


def test_a_data_set_is_a_repository_of_one(run: Run, tmp_path: Path) -> None:
    order = SynthesisOrder(records=6, form="parquet", licence="mit")
    synthesize(run, tmp_path / "out", order, accept_risk=True, to_hub=True)
    card = DatasetCard.load(tmp_path / "out" / "README.md")
    assert card.data.size_categories == ["n<1K"]
    (files,) = card.data.to_dict()["configs"]
    (file,) = (tmp_path / "out").glob(files["data_files"][0]["path"])
    assert committed(tmp_path / "out")[file.relative_to(tmp_path / "out").as_posix()] == "lfs"
    loaded = datasets.load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == 6


def test_nobody_else_gets_a_file_of_git(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "out", "safetensors", accept_risk=True)
    assert not (tmp_path / "out" / ".gitattributes").exists()
