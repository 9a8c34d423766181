"""A server operator who sends silos other apps than fedloom's: each is refused at once, and nothing of it is run."""

from __future__ import annotations

import io
import os
import signal
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedloom.deployment.apps import DESCRIPTION
from fedloom.deployment.door import through
from fedloom.deployment.status import silo_status
from places import METHODS, Place, pid
from support import wait_for

pytestmark = pytest.mark.system
AT_ONCE = 20.0  # seconds; a SuperNode that refused to start a task left its sender without an answer for 150
OURS = DESCRIPTION.partition("[tool.flwr.app.components]")[2].partition("[tool.flwr.app.config]")[0]
EVIL = "import pathlib\npathlib.Path({marker!r}).write_text('was here')\napp = None\n"


def wheel(marker: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as files:
        files.writestr("evil/__init__.py", EVIL.format(marker=marker))
        files.writestr("evil-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    return data.getvalue()


def apps(folder: Path) -> dict[str, bytes]:
    """Apps that would leave a file with their name in a folder, were anything of them run."""
    found = {}

    def add(case: str, components: str, wanted: str = "[]", **files: bytes) -> None:
        text = DESCRIPTION.replace(OURS, f"\n{components}\n\n").replace("dependencies = []", f"dependencies = {wanted}")
        everything = {"pyproject.toml": text.encode(), **files}
        found[case] = build_fab_from_files(everything)[0]

    def evil(case: str) -> bytes:
        return EVIL.format(marker=str(folder / case)).encode()

    add("agentapp", 'agentapp = "evil:app"', **{"evil.py": evil("agentapp")})
    both = 'serverapp = "evil:app"\nclientapp = "evil:app"'
    add("serverapp", both, **{"evil.py": evil("serverapp")})
    add("entry-point", 'serverapp = "os:path"\nclientapp = "os:abort"')
    add("files", OURS, **{"fedloom/deployment/node.py": evil("files")})
    add("wheel", OURS, **{"evil-1.0-py3-none-any.whl": wheel(str(folder / "wheel"))})
    package = folder / "package"
    package.mkdir()
    (package / "setup.py").write_text(
        f"{evil('dependency').decode()}\nimport setuptools; setuptools.setup(name='evil')"
    )
    add("dependency", OURS, f'["evil @ file://{package}"]')
    return found


@contextmanager
def grid_of(flower_place: Place, app: bytes) -> Iterator[HttpGrid]:
    """A run with an app, whose server is this test: the SuperLink's owner takes its token before anybody else."""
    door = flower_place.place.server.door.socket
    assert door is not None
    executor = pid(flower_place.serving.executor)
    os.kill(executor, signal.SIGSTOP)
    try:
        fab = Fab(hash_str=sha256(app).hexdigest(), content=app)
        with through(ControlHttpClient, door, "flwr CLI", 30.0) as client:
            number = client.StartRun(StartRunRequest(fab=fab, user_prompt="do as I say")).run_id
        kinds = [TaskType.SERVER_APP, TaskType.AGENT_APP, TaskType.SIMULATION]
        with through(RuntimeHttpClient, door, "SuperExec", 30.0) as client:
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=kinds))
        assert found.token
    finally:
        os.kill(executor, signal.SIGCONT)
    with through(RuntimeHttpClient, door, "flwr-serverapp", 30.0, RuntimeTokenHttpInterceptor(found.token)) as client:
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid = HttpGrid(token=found.token)
        grid._client = client
        grid.set_run(run_from_proto(task.run))
        yield grid
        flower_place.serving.control.stop(number)


def answers(grid: HttpGrid) -> list[Message]:
    """What comes of a message to every silo."""
    content = RecordDict({"header": ConfigRecord({"json": "{}"})})
    nodes = list(grid.get_node_ids())
    asked = set(grid.push_messages([Message(content, node, MessageType.TRAIN, ttl=600.0) for node in nodes]))
    found: list[Message] = []

    def all_have() -> bool:
        for reply in grid.pull_messages(asked):
            if reply.metadata.reply_to_message_id in asked:  # of an agent's run its first prompt comes, too
                asked.remove(reply.metadata.reply_to_message_id)
                found.append(reply)
        return not asked

    wait_for(all_have, "all silos have answered", AT_ONCE)
    return found


def test_no_silo_runs_anything_that_a_server_sends(flower_place: Place, tmp_path: Path) -> None:
    markers, name = tmp_path / "markers", "beside-foreign-apps"
    markers.mkdir()
    markers.chmod(0o777)
    sent = apps(markers)
    for case, app in sent.items():
        start = time.monotonic()
        with grid_of(flower_place, app) as grid:
            replies = answers(grid)
        assert time.monotonic() - start < AT_ONCE
        assert len(replies) == len(flower_place.joined)
        for reply in replies:
            assert reply.has_error()
            assert "this silo" in reply.error.reason
            assert ("flwr-agentapp" in reply.error.reason) == (case == "agentapp")
    flower_place.run(name, *METHODS["fissionvae-d"])  # and who is honest is served as ever
    assert flower_place.same(name)
    assert sorted(path.name for path in markers.iterdir()) == ["package"]
    for silo in flower_place.joined:
        refusals = silo_status(silo.home)["refused"]
        assert len(refusals) == len(sent)
        told = [line for line in flower_place.said if line.startswith("node: refused: ")]
        assert len(told) == len(sent) * len(flower_place.joined)
        assert not any((silo.home.path / "flower").rglob("*.py"))
