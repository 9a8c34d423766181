"""A run at the server: fedloom's experiment, with silos that are elsewhere."""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import httpx
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedloom.deployment.charter import load_records
from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.door import through
from fedloom.deployment.gathering import gather
from fedloom.deployment.processes import locked
from fedloom.deployment.submissions import Submission
from fedloom.engines.base import Engine
from fedloom.engines.charging import shares_noise
from fedloom.engines.flower.rounds import Event, FlowerEngine
from fedloom.engines.flower.secure_rounds import SecureEngine
from fedloom.engines.flower.wire import FlowerGrid, Wire
from fedloom.errors import FedloomError
from fedloom.experiment import Experiment
from fedloom.runs.files import append_lines
from fedloom.runs.folder import RunFolder

log = logging.getLogger(__name__)
TIMEOUT = 30.0  # seconds that a call may take


def carry_out(home: ServerDirectory, door: Path, token: str) -> None:
    """What a token of the SuperLink stands for: one submission, whose end is written beside it."""
    identity = RuntimeTokenHttpInterceptor(token)
    # A SuperLink that died takes its runs along ('serve' sees to it): until then a run must not go on without silos.
    with through(RuntimeHttpClient, door, "flwr-serverapp", TIMEOUT, identity, patient=True) as client:
        heart = HeartbeatSender(partial(_beat, client))
        heart.start()
        problem = "it was stopped"
        try:
            task = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
            TaskIdentity.node_id = task.context.node_id
            run = run_from_proto(task.run)
            grid = HttpGrid(token=token)
            grid._client = client  # through the socket, where it would open a port's connection by itself
            grid.set_run(run)
            problem = perform(home, str(run.override_config.get("submission", "")), grid)
        except FedloomError as error:
            problem = str(error)
            log.error("%s", error)
        finally:
            heart.stop()
            status = SubStatus.FAILED if problem else SubStatus.COMPLETED
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=problem))


def _beat(client: RuntimeHttpClient) -> bool:
    """Tell the SuperLink that the run goes on; one that was stopped by its coordinator is interrupted."""
    try:
        going_on = client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
    except httpx.HTTPError:  # a SuperLink that is busy is told again
        return False
    if not going_on:
        os.kill(os.getpid(), signal.SIGINT)
    return True


def perform(home: ServerDirectory, number: str, grid: FlowerGrid) -> str:
    """Carry out a submission; returns the problem that it ended with, which is empty where there is none."""
    submission = Submission.open(home, number)
    sys.argv = list(submission.command)  # the run's folder quotes it
    problem = "the run was stopped"
    try:
        # A run that is resumed while it goes on would be driven twice.
        with locked(submission.path.with_name(f"{submission.run}.lock"), f"{submission.folder} is being run already"):
            _train(home, submission, grid)
        problem = ""
    except FedloomError as error:
        problem = str(error)
    except Exception as error:
        problem = f"the server failed: {type(error).__name__}: {error}"
        log.exception("failed")
    finally:
        submission.end(problem)
    return problem


def _train(home: ServerDirectory, submission: Submission, grid: FlowerGrid) -> None:
    """From the start, or on from the newest checkpoint of a folder that is there; at the end silos state its cost."""
    public = (
        load_records(Path(home.settings.public_set), modality=home.charter.modality)
        if home.settings.public_set
        else None
    )
    experiment = Experiment.of(submission.config, home.charter.at_the_server(public))
    journal = partial(note, submission.folder / "silos.jsonl")
    declared = home.charter.records
    engine: Engine
    if shares_noise(submission.config):
        keys = home.keys_admitted()
        engine = SecureEngine(experiment.trainer, submission.run, Wire(grid), home.rules, declared, keys, journal)
    else:
        engine = FlowerEngine(experiment.trainer, submission.run, Wire(grid), home.rules, declared, journal)
    if not submission.folder.is_dir():
        experiment.run(submission.folder, engine=engine)
    elif (folder := RunFolder.open(submission.folder)).status["state"] == "unfinished":
        experiment.resume(folder, engine=engine)
    wire = Wire(grid)
    try:
        gather(home, RunFolder.open(submission.folder), submission.run, wire, journal)
    finally:
        wire.close()


def note(path: Path, event: Event) -> None:
    """Add an event to the run's journal."""
    append_lines(path, [{key: value for key, value in asdict(event).items() if value}])
