"""A run never goes on with, and is never measured on, other records than those that it was trained on."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.killing import train_until_write
from fedloom.deployment.charter import Charter
from fedloom.errors import RunFolderError
from fedloom.experiment import Experiment, load, resume, train
from fedloom.federation.building import federation_from_arrays
from fedloom.federation.records import Federation
from fedloom.runs.folder import DataSource, RunFolder
from support import tiny_config

Refused = Callable[..., str]


def own(seed: int = 1) -> Federation:
    """Images that lie in no file."""
    generator = np.random.default_rng(seed)
    silos = {name: generator.uniform(0, 1, (40, 28, 28)) for name in ("north", "south")}
    return federation_from_arrays(silos, groups={"north": "mnist", "south": "fashion-mnist"})


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run in memory that was killed before its first checkpoint: nothing but its start is in its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["/home/ada/train_lungs.py"])
        Experiment.of(tiny_config(), own()).begin(tmp_path / "killed")
    assert RunFolder.open(tmp_path / "killed").rounds_done == 0
    return tmp_path / "killed"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_config("method={name='fedvae'}"), tmp_path_factory.mktemp("own") / "run", own()).folder.path


def test_a_run_that_was_killed_at_once_goes_on_with_its_own_records_alone(killed: Path, refused: Refused) -> None:
    sentence = refused("resume", killed)
    assert "was trained on records in memory (train_lungs.py), which its folder does not hold" in sentence
    assert f"fedloom.resume('{killed}', federation=...)" in sentence
    with pytest.raises(RunFolderError, match="the data have changed: these are not the records that it was trained on"):
        resume(killed, own(seed=2))
    assert RunFolder.open(killed).metrics() == []
    assert resume(killed, own()).folder.status["state"] == "finished"


@pytest.mark.parametrize("command", ["evaluate", "downstream", "audit"])
def test_what_needs_its_records_says_that_they_were_in_memory(command: str, trained: Path, refused: Refused) -> None:
    sentence = refused(command, trained)
    assert "was trained on records in memory (" in sentence
    assert "federation=... to what measures it" in sentence


@pytest.mark.parametrize("command", ["evaluate", "downstream", "audit", "resume"])
def test_what_needs_records_of_a_deployment_says_where_they_are(
    command: str, trained: Path, refused: Refused, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    RunFolder.open(run).note({"data": {"name": "the silos of federation clinics", "digest": "", "public": False}})
    assert "was trained at the silos of federation clinics, whose records are not here" in refused(command, run)


def test_a_deployments_run_is_named_so_at_its_start(tmp_path: Path) -> None:
    charter = Charter(name="clinics", address="localhost:8443", silos={"one": "mnist"}, shape=(1, 28, 28))
    Experiment.of(tiny_config("evaluation.metrics=[]"), charter.at_the_server()).begin(tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").data_source.name == "the silos of federation clinics"


def test_its_own_records_measure_it(trained: Path, tmp_path: Path) -> None:
    run = load(shutil.copytree(trained, tmp_path / "run"))
    settings = tiny_config("evaluation.metrics=['spread']", "evaluation.samples=10").evaluation
    assert run.evaluate(settings=settings, federation=own())
    with pytest.raises(RunFolderError, match="the data have changed"):
        run.evaluate(settings=settings, federation=own(seed=2))


def test_a_file_that_changed_before_the_first_checkpoint_is_noticed(tmp_path: Path, refused: Refused) -> None:
    file, run = tmp_path / "own.npz", tmp_path / "run"
    settings = ("data.source=npz", f"data.path={file}", "data.partition=iid", "method={name='fedvae'}")
    np.savez(file, x_train=np.random.default_rng(1).integers(0, 256, (90, 28, 28), dtype=np.uint8))
    train_until_write(tiny_config(*settings), run, 4)
    assert (RunFolder.open(run).rounds_done, RunFolder.open(run).data_source.name) == (0, "npz")
    np.savez(file, x_train=np.random.default_rng(2).integers(0, 256, (90, 28, 28), dtype=np.uint8))
    assert "the data have changed" in refused("resume", run)


def test_a_run_of_an_older_version_goes_on_as_before(tmp_path: Path) -> None:
    Experiment.of(tiny_config()).begin(tmp_path / "run")
    noted = json.loads((tmp_path / "run" / "environment.json").read_text())
    (tmp_path / "run" / "environment.json").write_text(json.dumps({k: noted[k] for k in noted if k != "data"}))
    assert RunFolder.open(tmp_path / "run").data_source == DataSource("mixed-mnist-sample")
    assert resume(tmp_path / "run").folder.status["state"] == "finished"
