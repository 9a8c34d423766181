"""What a run was trained on is written down at its start, as it really was."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.config import DataConfig
from fedloom.deployment.charter import Charter
from fedloom.experiment import Experiment, train
from fedloom.experiment.origin import origin_of
from fedloom.federation.building import build_federation
from fedloom.reports.report import write_report
from fedloom.runs.folder import DataSource, RunFolder
from fedloom.streams import Streams
from support import federation_of, tiny_config

CHARTER = Charter(name="clinics", address="localhost:8443", silos={"one": "a", "two": "b"}, shape=(1, 28, 28))


def recorded(folder: Path, *overrides: str, in_memory: bool = False) -> DataSource:
    config = tiny_config(*overrides)
    federation = federation_of([0, 0], [1, 1], width=784) if in_memory else None
    Experiment.of(config, federation).begin(folder)
    return RunFolder.open(folder).data_source


def test_a_source_is_named_with_a_digest_of_the_very_records(tmp_path: Path) -> None:
    found = recorded(tmp_path / "run")
    config = tiny_config()
    digest = build_federation(config.data, Streams(config.seed)).digest
    assert found == DataSource("mixed-mnist-sample", digest, public=True)


def test_records_in_memory_are_named_by_who_held_them_and_are_not_public(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/ada/study/train_lungs.py", "--fast"])
    found = recorded(tmp_path / "run", in_memory=True)
    assert found == DataSource("in memory (train_lungs.py)", federation_of([0, 0], [1, 1], width=784).digest, False)
    assert recorded(tmp_path / "marked", "data.public=true", in_memory=True).public


@pytest.mark.parametrize("argv", ["", "-c"])
def test_a_caller_without_a_script_is_python(argv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [argv])
    assert origin_of(tiny_config(), federation_of([0, 0])).name == "in memory (Python)"


def test_a_deployment_has_the_silos_of_its_federation_and_is_not_public() -> None:
    found = origin_of(tiny_config(), CHARTER.at_the_server())
    assert (found.name, found.public) == ("the silos of federation clinics", False)


def test_a_federation_that_was_built_from_other_settings_is_not_called_by_these() -> None:
    built = build_federation(DataConfig(source="mnist-sample", silos=2, records_per_silo=20), Streams(0))
    assert origin_of(tiny_config(), built).name.startswith("in memory (")
    assert origin_of(replace(tiny_config(), data=built.described or DataConfig()), built).name == "mnist-sample"


def test_a_pooled_layout_is_still_of_its_source() -> None:
    experiment = Experiment.of(tiny_config("data.layout=centralised"), build_federation(tiny_config().data, Streams(0)))
    assert origin_of(experiment.config, experiment.federation).name == "mixed-mnist-sample"


def test_a_folder_of_an_older_version_knows_the_name_of_its_settings_alone(tmp_path: Path) -> None:
    """Records that were in memory then went by that name too, so that it makes nothing public."""
    folder = RunFolder.create(tmp_path / "run", tiny_config())
    assert folder.data_source == DataSource("mixed-mnist-sample", "", public=False)
    marked = RunFolder.create(tmp_path / "marked", tiny_config("data.public=true"))
    assert marked.data_source.public


def test_records_may_be_marked_as_public_later_and_it_stays_the_same_experiment(tmp_path: Path) -> None:
    config = tiny_config("data.source=npz", "data.path=own.npz")
    folder = RunFolder.create(tmp_path / "run", config, DataSource("npz", "1234"))
    toml = (folder.path / "run.toml").read_text()
    (folder.path / "run.toml").write_text(toml.replace("public = false", "public = true"))
    again = RunFolder.open(folder.path)
    assert (folder.data_source.public, again.data_source.public) == (False, True)
    assert again.config.digest() == folder.config.digest()
    assert json.loads((folder.path / "environment.json").read_text())["data"]["public"] is False


def test_what_is_mailed_does_not_have_the_digest(tmp_path: Path) -> None:
    """Whoever guesses the records could tell from it that he is right."""
    run = train(tiny_config("rounds=1"), tmp_path / "run")
    write_report([run], tmp_path / "report.html")
    for mailed in tmp_path.glob("report.*"):
        assert run.folder.data_source.digest not in mailed.read_text(encoding="utf-8")
    assert run.folder.data_source.digest in (tmp_path / "run" / "environment.json").read_text()
