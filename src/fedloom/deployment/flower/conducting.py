"""The server's half in a Flower federation: the experiment as ever, through the grid that Flower hands over."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

from fedloom.deployment.flower.folder import FlowerApp
from fedloom.deployment.flower.nodes import KnownNodes
from fedloom.deployment.performing import journalled
from fedloom.deployment.processes import locked
from fedloom.engines.flower.grid_wire import POLL, FlowerGrid, FlowerWire
from fedloom.engines.flower.rounds import Event, FlowerEngine
from fedloom.errors import FedloomError
from fedloom.experiment import Experiment
from fedloom.runs.folder import RunFolder


def conduct(grid: FlowerGrid, app: FlowerApp, poll: float = POLL) -> Path:
    """Carry the app's experiment out, or on from where a run of the same folder stopped; returns that folder."""
    app.check()
    path = Path.home() / app.run
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.argv = ["flwr", "run"]  # the run's folder quotes it, and Flower's own words have a secret among them
    with locked(path.with_name(f".{path.name}.lock"), f"{path} is being run already"):
        _train(grid, app, path, poll)
    return path


def _train(grid: FlowerGrid, app: FlowerApp, path: Path, poll: float) -> None:
    folder = RunFolder.open(path) if path.is_dir() else None
    if folder and folder.status["state"] != "unfinished":
        raise FedloomError(f"{path} holds a run that has ended; choose another folder: flwr run DIR -c 'run=\"...\"'")
    if folder and folder.config.digest() != app.config.digest():
        raise FedloomError(f"{path} holds another experiment; choose another folder: flwr run DIR -c 'run=\"...\"'")
    experiment = Experiment.of(app.config, app.charter.at_the_server())
    known = folder.environment.get("engine_choice", {}).get("run", "") if folder else ""
    wire = FlowerWire(KnownNodes(grid, app.charter.silos), poll)
    run = known or uuid.uuid4().hex[:12]  # under which silos keep what belongs to it

    def journal(event: Event) -> None:
        journalled(path, event)

    engine = FlowerEngine(experiment.trainer, run, wire, app.rules, app.charter.records, journal)
    if folder:
        experiment.resume(folder, engine=engine)
    else:
        experiment.run(path, engine=engine)
