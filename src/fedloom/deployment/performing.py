"""A run at the server: fedloom's experiment, with silos that are elsewhere, by whatever wire."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.deployment.charter import load_records
from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.gathering import gather
from fedloom.deployment.processes import locked
from fedloom.deployment.submissions import Submission
from fedloom.engines.base import Engine
from fedloom.engines.charging import shares_noise
from fedloom.engines.remote.rounds import Event, RemoteEngine
from fedloom.engines.remote.secure_rounds import SecureEngine
from fedloom.engines.remote.wire import Wire
from fedloom.errors import FedloomError
from fedloom.experiment import Experiment
from fedloom.operations.trail import AUDIT, Deed, Trail
from fedloom.runs.files import append_lines
from fedloom.runs.folder import RunFolder

log = logging.getLogger(__name__)
Wiring = Callable[[Submission], Wire]  # a wire in the name of a run


def perform(home: ServerDirectory, number: str, wiring: Wiring) -> str:
    """Carry out a submission; returns the problem that it ended with, which is empty where there is none."""
    submission = Submission.open(home, number)
    sys.argv = list(submission.command)  # the run's folder quotes it
    problem = "the run was stopped"
    try:
        # A run that is resumed while it goes on would be driven twice.
        with locked(submission.lock, f"{submission.folder} is being run already"):
            _train(home, submission, wiring)
        problem = ""
    except FedloomError as error:
        problem = str(error)
    except Exception as error:
        problem = f"the server failed: {type(error).__name__}: {error}"
        log.exception("failed")
    finally:
        submission.end(problem)
    return problem


def _train(home: ServerDirectory, submission: Submission, wiring: Wiring) -> None:
    """From the start, or on from the newest checkpoint of a folder that is there; at the end silos state its cost."""
    public = (
        load_records(Path(home.settings.public_set), modality=home.charter.modality)
        if home.settings.public_set
        else None
    )
    experiment = Experiment.of(submission.config, home.charter.at_the_server(public))
    journal = partial(note, Trail(home.path / AUDIT), submission)
    declared = home.charter.records
    engine: Engine
    if shares_noise(submission.config):
        keys = home.keys_admitted()
        engine = SecureEngine(
            experiment.trainer, submission.run, wiring(submission), home.rules, declared, keys, journal
        )
    else:
        engine = RemoteEngine(experiment.trainer, submission.run, wiring(submission), home.rules, declared, journal)
    if not submission.folder.is_dir():
        experiment.run(submission.folder, engine=engine)
    elif (folder := RunFolder.open(submission.folder)).status["state"] == "unfinished":
        experiment.resume(folder, engine=engine)
    wire = wiring(submission)
    try:
        gather(home, RunFolder.open(submission.folder), submission.run, wire, journal)
    finally:
        wire.close()


AUDITED: Mapping[str, Deed] = {name: name for name in ("asked", "answered", "failed", "refused", "rejected")}


def note(trail: Trail, submission: Submission, event: Event) -> None:
    """Add an event to the run's journal, and to the server's audit log what a silo was asked and answered."""
    words = journalled(submission.folder, event)
    if deed := AUDITED.get(event.event):
        trail.note(deed, {"run": submission.run, **words}, durable=False)


def journalled(folder: Path, event: Event) -> dict[str, Any]:
    """An event as it was added to a run's journal."""
    words = {key: value for key, value in asdict(event).items() if value}
    append_lines(folder / "silos.jsonl", [words])
    return words
