"""Where metrics go beside metrics.jsonl, which is always written: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fedloom.config import Config
from fedloom.errors import ConfigError, MissingExtraError, unknown

AUTO = "auto"
FOREIGN = re.compile(r"[^\w\-. :/]", re.ASCII)  # what MLflow takes in no name
MOST_LETTERS = 6000  # of a parameter there


class Tracker(Protocol):
    """Hears the numbers of every round."""

    def record(self, round_number: int, row: Mapping[str, Any]) -> None:
        """Take in a round's row of metrics.jsonl."""
        ...

    def close(self) -> None:
        """Write what is still held back: the run has stopped."""
        ...


class TensorBoard:
    """Event files in ``tensorboard/``; rounds that a resumed run repeats replace those of before."""

    def __init__(self, folder: Path, rounds_done: int) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=rounds_done + 1)

    def record(self, round_number: int, row: Mapping[str, Any]) -> None:
        """A scalar for each number."""
        for key, value in _numbers(row).items():
            self._writer.add_scalar(key, value, round_number)
        self._writer.flush()

    def close(self) -> None:
        """Close the file of events."""
        self._writer.close()


class WeightsAndBiases:
    """A run in offline mode in ``wandb/``: nothing is sent before somebody calls ``wandb sync``."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._run = importlib.import_module("wandb").init(
            project="fedloom",
            name=folder.name,
            dir=str(folder),
            config=config.to_mapping(),
            mode="offline",
            settings={"silent": True},
        )

    def record(self, round_number: int, row: Mapping[str, Any]) -> None:
        """All numbers of a round at once."""
        self._run.log(_numbers(row), step=round_number)

    def close(self) -> None:
        """Finish the offline run."""
        self._run.finish()


class MLflow:
    """A run in the database ``mlflow.db`` of the folder, for ``mlflow ui``; a resumed run goes on in it."""

    def __init__(self, config: Config, folder: Path) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it speaks of tables that it makes
        self._client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        known = self._client.get_experiment_by_name("fedloom")
        experiment = known.experiment_id if known else self._client.create_experiment("fedloom")
        runs = self._client.search_runs([experiment], max_results=1)
        self._run = (runs[0] if runs else self._client.create_run(experiment, run_name=folder.name)).info.run_id
        self._logged = max((each.step for each in self._client.get_metric_history(self._run, "seconds")), default=0)
        if not runs:
            for section, values in config.to_mapping().items():
                self._client.log_param(self._run, section, json.dumps(values)[:MOST_LETTERS])

    def record(self, round_number: int, row: Mapping[str, Any]) -> None:
        """A metric for each number; rounds that a resumed run repeats are there already."""
        if round_number > self._logged:
            for key, value in _numbers(row).items():
                self._client.log_metric(self._run, FOREIGN.sub(":", key), value, step=round_number)

    def close(self) -> None:
        """The run has stopped."""
        self._client.set_terminated(self._run)


TRACKERS: dict[str, Callable[[Config, Path, int], Tracker]] = {  # (config, folder, rounds that are done)
    "tensorboard": lambda _, folder, rounds_done: TensorBoard(folder, rounds_done),
    "wandb": lambda config, folder, _: WeightsAndBiases(config, folder),
    "mlflow": lambda config, folder, _: MLflow(config, folder),
}


def check_trackers(config: Config) -> None:
    """Refuse, before anything is written, a name that nobody knows and one whose package is missing."""
    for name in config.evaluation.trackers:
        if name not in TRACKERS and name != AUTO:
            raise ConfigError("evaluation.trackers: " + unknown("tracker", name, [AUTO, *TRACKERS]))
        if name in TRACKERS and not _installed(name):
            raise MissingExtraError(
                f"tracker '{name}' needs the package '{name}'; install it with: pip install 'fedloom[{name}]'"
            )


def open_trackers(config: Config, folder: Path, rounds_done: int) -> list[Tracker]:
    """The configured trackers of a run folder; ``auto`` is TensorBoard where it is installed."""
    check_trackers(config)
    names = dict.fromkeys("tensorboard" if name == AUTO else name for name in config.evaluation.trackers)
    return [TRACKERS[name](config, folder, rounds_done) for name in names if _installed(name)]


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, int | float) and key != "round"}


def _installed(name: str) -> bool:
    """Trackers bear the names of their packages."""
    return importlib.util.find_spec(name) is not None
