"""A run at the server as Flower starts it: a token of its SuperLink stands for a submission."""

from __future__ import annotations

import logging
import os
import signal
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

from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.door import through
from fedloom.deployment.performing import perform
from fedloom.engines.flower.grid_wire import FlowerWire
from fedloom.errors import FedloomError

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
            problem = perform(home, str(run.override_config.get("submission", "")), lambda _: FlowerWire(grid))
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
