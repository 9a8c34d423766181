"""What Flower starts at the server for a run: fedloom's experiment, with silos that are elsewhere."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.utils import get_flwr_home

from fedloom.deployment.charter import load_records
from fedloom.deployment.homes import ServerHome
from fedloom.deployment.processes import locked
from fedloom.deployment.submissions import Submission
from fedloom.engines.flower.rounds import Event, FlowerEngine
from fedloom.engines.flower.wire import Wire
from fedloom.errors import FedloomError
from fedloom.experiment import Experiment
from fedloom.runs.files import append_lines
from fedloom.runs.folder import RunFolder

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out a submission; how it ended is written beside it."""
    home = ServerHome.open(get_flwr_home().parent)
    submission = Submission.open(home, str(context.run_config["submission"]))
    sys.argv = list(submission.command)  # the run's folder quotes it; Flower's own holds a secret
    try:
        # A run that is resumed while it goes on would be driven twice.
        with locked(submission.path.with_name(f"{submission.run}.lock"), f"{submission.folder} is being run already"):
            carry_out(home, submission, grid)
    except FedloomError as error:
        submission.end(str(error))
        raise
    except Exception as error:
        submission.end(f"the server failed: {type(error).__name__}: {error}")
        raise
    submission.end("")


def carry_out(home: ServerHome, submission: Submission, grid: Grid) -> None:
    """From the start, or on from the newest checkpoint of a folder that is there."""
    public = load_records(Path(home.settings.public_set)) if home.settings.public_set else None
    experiment = Experiment.of(submission.config, home.charter.at_the_server(public))
    journal = partial(note, submission.folder / "silos.jsonl")
    engine = FlowerEngine(experiment.trainer, submission.run, Wire(grid), home.rules, journal)
    if submission.folder.is_dir():
        experiment.resume(RunFolder.open(submission.folder), engine=engine)
    else:
        experiment.run(submission.folder, engine=engine)


def note(path: Path, event: Event) -> None:
    """Add an event to the run's journal."""
    append_lines(path, [{key: value for key, value in asdict(event).items() if value}])
