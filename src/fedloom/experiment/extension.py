"""More rounds for a run that has some: what may be trained on, and what must be begun anew."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fedloom.config import Config
from fedloom.errors import ConfigError
from fedloom.federation.records import Federation
from fedloom.runs.folder import RunFolder

if TYPE_CHECKING:
    from fedloom.experiment.experiment import Experiment


def more_rounds(folder: RunFolder, rounds: int) -> Config:
    """The run's configuration with so many rounds in all; refused where the number was part of a promise."""
    config, where = folder.config, folder.path
    if rounds <= config.rounds:
        raise ConfigError(f"{where} has {config.rounds} rounds already; rounds = {rounds} would add none")
    if config.privacy.mechanism != "none":
        raise ConfigError(
            f"the noise of {where} was planned for {config.rounds} rounds: more would cost more privacy than was "
            "granted; begin a new run"
        )
    if folder.is_deployed:
        raise ConfigError(f"the silos of {where} agreed to {config.rounds} rounds; begin a new run")
    if folder.status["state"] == "diverged":
        raise ConfigError(f"{where} diverged; more rounds would begin where it broke off")
    return replace(config, rounds=rounds)


def check_sent_once(before: Experiment, after: Experiment) -> None:
    """Refuse where the round that was the last closed the run, or silos sent something in it and would again."""
    last = before.config.rounds
    if before.method.server_step.closes:
        raise ConfigError("the last round left other weights than those that rounds go on from; begin a new run")
    for old, new in zip(before.trainer.attended, after.trainer.attended, strict=True):
        for rule in before.method.payloads:
            if set(rule.rounds(old)) != {number for number in rule.rounds(new) if number <= last}:
                raise ConfigError(
                    f"in what was their last round the silos sent '{rule.name}', which closes a run of "
                    f"'{before.method.name}'; begin a new run"
                )


def extend(folder: RunFolder, rounds: int, federation: Federation | None) -> RunFolder:
    """Open a run's folder again for so many rounds in all."""
    from fedloom.experiment.experiment import Experiment

    config = more_rounds(folder, rounds)
    check_sent_once(Experiment.of(folder.config, federation), Experiment.of(config, federation))
    return folder.reopened(config)
