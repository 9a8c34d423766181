"""The server's half in a federation of others: the experiment as ever, through the wire that their engine makes."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

from fedloom.deployment.hosted.run import HostedRun
from fedloom.deployment.performing import journalled
from fedloom.deployment.processes import locked
from fedloom.engines.remote.rounds import Event, RemoteEngine
from fedloom.engines.remote.wire import Wire
from fedloom.errors import FedloomError
from fedloom.experiment import Experiment
from fedloom.runs.folder import RunFolder


def conduct(hosted: HostedRun, wire: Wire, command: str) -> Path:
    """Carry the experiment out, or on from where a run of the same folder stopped; returns that folder."""
    hosted.check()
    path = Path.home() / hosted.run
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.argv = command.split()  # the run's folder quotes it, and the engine's own words may have a secret among them
    with locked(path.with_name(f".{path.name}.lock"), f"{path} is being run already"):
        _train(hosted, path, wire)
    return path


def _train(hosted: HostedRun, path: Path, wire: Wire) -> None:
    folder = RunFolder.open(path) if path.is_dir() else None
    if folder and folder.status["state"] != "unfinished":
        raise FedloomError(f"{path} holds a run that has ended; choose another folder ('run')")
    if folder and folder.config.digest() != hosted.config.digest():
        raise FedloomError(f"{path} holds another experiment; choose another folder ('run')")
    experiment = Experiment.of(hosted.config, hosted.charter.at_the_server())
    known = folder.environment.get("engine_choice", {}).get("run", "") if folder else ""
    run = known or uuid.uuid4().hex[:12]  # under which silos keep what belongs to it

    def journal(event: Event) -> None:
        journalled(path, event)

    engine = RemoteEngine(experiment.trainer, run, wire, hosted.rules, hosted.charter.records, journal)
    if folder:
        experiment.resume(folder, engine=engine)
    else:
        experiment.run(path, engine=engine)
