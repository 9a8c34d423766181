"""Where metrics go beside metrics.jsonl, which is always written: TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fedloom.config import Config
from fedloom.errors import ConfigError, MissingExtraError, unknown

AUTO = "auto"


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


TRACKERS: dict[str, Callable[[Config, Path, int], Tracker]] = {  # (config, folder, rounds that are done)
    "tensorboard": lambda _, folder, rounds_done: TensorBoard(folder, rounds_done),
    "wandb": lambda config, folder, _: WeightsAndBiases(config, folder),
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
