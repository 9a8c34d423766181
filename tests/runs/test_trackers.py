from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedloom.engines.base import RoundReport
from fedloom.errors import ConfigError, MissingExtraError
from fedloom.experiment import Observer, resume, train
from fedloom.runs import trackers
from support import names_in, tiny_config

WITH_METRICS = ("evaluation.every=1", 'evaluation.metrics=["cost"]')


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that this test says are there."""
    names: set[str] = set()
    find = importlib.util.find_spec

    def spec(name: str, *arguments: Any) -> Any:
        return name in names or None if name in trackers.TRACKERS else find(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", spec)
    return names


class Writer:
    """Stands for SummaryWriter: remembers what it was called with."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False
        opened.append(self)

    def add_scalar(self, key: str, value: float, step: int) -> None:
        self.scalars.append((key, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


opened: list[Writer] = []


@pytest.fixture
def tensorboard(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    opened.clear()
    installed.add("tensorboard")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    return opened


def test_without_packages_a_run_writes_metrics_jsonl_alone(installed: set[str], tmp_path: Path) -> None:
    train(tiny_config("rounds=1"), tmp_path / "run")
    found = names_in(tmp_path / "run")
    assert "metrics.jsonl" in found
    assert not {"tensorboard", "wandb"} & set(found)


def test_tensorboard_is_used_where_it_is_installed(tensorboard: list[Writer], tmp_path: Path) -> None:
    run = train(tiny_config(*WITH_METRICS), tmp_path / "run")
    (writer,) = tensorboard
    assert (writer.folder, writer.purge_step, writer.closed) == (str(tmp_path / "run" / "tensorboard"), 1, True)
    rows = run.metrics()
    for row in rows:
        numbers = {key: value for key, value, step in writer.scalars if step == row["round"]}
        assert numbers == {key: value for key, value in row.items() if key not in ("round", "participants")}
    assert {"seconds", "cost/steps/n2"} <= set(rows[-1])


def test_a_resumed_run_purges_what_it_repeats(tensorboard: list[Writer], tmp_path: Path) -> None:
    run = train(tiny_config("rounds=3", "engine.checkpoint_every=2"), tmp_path / "run")
    (run.folder.path / "status.json").unlink()
    shutil.rmtree(run.folder.path / "checkpoints" / "round-0003")
    resume(tmp_path / "run")
    assert [writer.purge_step for writer in tensorboard] == [1, 3]
    assert {step for _, _, step in tensorboard[1].scalars} == {3}


def test_no_trackers(tensorboard: list[Writer], tmp_path: Path) -> None:
    train(tiny_config("rounds=1", "evaluation.trackers=[]"), tmp_path / "run")
    assert tensorboard == []


def test_weights_and_biases_stays_offline(installed: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed.add("wandb")
    begun: list[dict[str, Any]] = []
    logged: list[tuple[Mapping[str, float], int]] = []
    finished: list[bool] = []

    def init(**options: Any) -> Any:
        begun.append(options)
        return SimpleNamespace(
            log=lambda numbers, step: logged.append((numbers, step)), finish=lambda: finished.append(True)
        )

    module = ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = tiny_config("evaluation.trackers=['wandb']")
    run = train(config, tmp_path / "run")
    assert (begun[0]["mode"], begun[0]["dir"]) == ("offline", str(tmp_path / "run"))
    assert begun[0]["config"] == config.to_mapping()
    assert [step for _, step in logged] == [1, 2]
    loss = next(key for key in run.metrics()[0] if key.endswith("/loss"))
    assert [numbers[loss] for numbers, _ in logged] == [row[loss] for row in run.metrics()]
    assert finished == [True]


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("tensorbord", ConfigError, "evaluation.trackers: unknown tracker 'tensorbord'; did you mean 'tensorboard'"),
        ("tensorboard", MissingExtraError, r"pip install 'fedloom\[tensorboard\]'"),
        ("wandb", MissingExtraError, r"pip install 'fedloom\[wandb\]'"),
    ],
)
def test_a_tracker_that_is_not_there_is_said_before_training(
    name: str, error: type[Exception], sentence: str, installed: set[str], tmp_path: Path
) -> None:
    with pytest.raises(error, match=sentence):
        train(tiny_config(f"evaluation.trackers=['{name}']"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_mlflow_keeps_a_run_in_its_folder(tmp_path: Path) -> None:
    """In a real store, without a server; a resumed run goes on in the same one, and says nothing twice."""
    mlflow = pytest.importorskip("mlflow")
    config = tiny_config(*WITH_METRICS, 'evaluation.trackers=["mlflow"]')

    class Stop(Observer):
        def round_done(self, report: RoundReport, metrics: dict[str, float]) -> None:
            if report.context.round == 1:
                shutil.rmtree(tmp_path / "run" / "checkpoints")  # the round is logged, and will be repeated
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", observer=Stop())
    run = resume(tmp_path / "run")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("fedloom").experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["rounds"] == "2"
    rows = run.metrics()
    for key in ("train/vae/loss", "cost/steps/n2"):
        history = {each.step: each.value for each in client.get_metric_history(found.info.run_id, key)}
        assert history == {row["round"]: row[key] for row in rows if key in row}
    assert [each.step for each in client.get_metric_history(found.info.run_id, "seconds")] == [1, 2]
