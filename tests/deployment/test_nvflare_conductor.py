"""What fedloom makes of NVFlare's tasks and sites, and of a job that is aborted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs the extra 'nvflare'")

from nvflare.apis.controller_spec import Task, TaskCompletionStatus
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal

from fedloom.config import load_config
from fedloom.deployment.charter import Charter
from fedloom.deployment.hosted.run import HostedRun
from fedloom.deployment.nvflare.conductor import Conductor, JobSites
from fedloom.deployment.nvflare.job import CHARTER, FRAME, write_job
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.rules import RoundRules
from fedloom.errors import FedloomError


class Controlled(Conductor):
    """A conductor without NVFlare's server: keeps what it sends, and is told who is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[Task, list[str]]] = []
        self.cancelled: list[Task] = []
        self.gone: set[str] = set()
        self.panics: list[str] = []

    def send(self, task: Task, fl_ctx: FLContext, targets: list[str]) -> None:
        self.sent.append((task, targets))

    def cancel_task(self, task: Task) -> None:
        self.cancelled.append(task)

    def get_client_disconnect_time(self, name: str) -> float | None:
        return 1.0 if name in self.gone else None

    def system_panic(self, reason: str, fl_ctx: FLContext) -> None:
        self.panics.append(reason)


class Context(FLContext):
    def get_engine(self) -> Any:
        return SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=name) for name in ("north", "south")])


def sites(conductor: Controlled, abort: Signal | None = None) -> JobSites:
    return JobSites(conductor, Context(), abort or Signal(), {CHARTER: "the charter"})


def test_a_site_that_was_gone_comes_back_as_another() -> None:
    conductor = Controlled()
    found = sites(conductor)
    assert found.present() == {"north": 0, "south": 0}
    conductor.gone.add("north")
    assert found.present() == {"south": 0}
    conductor.gone.clear()
    context = FLContext()
    context.set_prop(FLContextKey.RECONNECTED_CLIENT_NAME, "north")
    conductor.handle_event(EventType.CLIENT_RECONNECTED, context)
    assert found.present() == {"north": 1, "south": 0}


def told(code: str = ReturnCode.OK, **data: object) -> SimpleNamespace:
    result = make_reply(code)
    result.update(data)
    return SimpleNamespace(result=result)


ANSWER = Frame({"kind": "update"}, {"x": b"123"})


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (told(frame=ANSWER.to_bytes()), ""),
        (told(ReturnCode.EXECUTION_EXCEPTION), "NVFlare says EXECUTION_EXCEPTION"),
        (told(frame=ANSWER.to_bytes()[:-1]), "its answer is none of fedloom's: this is no whole frame"),
        (told(), "its answer is none of fedloom's: 'frame'"),
        (told(frame=7), "its answer is none of fedloom's: this is no whole frame"),
    ],
)
def test_a_task_goes_to_its_site_alone_and_brings_a_frame_or_a_problem(said: SimpleNamespace, problem: str) -> None:
    conductor, come = Controlled(), list[tuple[Frame | None, str]]()
    cancel = sites(conductor).assign("north", ANSWER, lambda frame, problem: come.append((frame, problem)))
    ((task, targets),) = conductor.sent
    assert targets == ["north"]
    assert (Frame.of_bytes(task.data[FRAME]), task.data[CHARTER]) == (ANSWER, "the charter")
    task.result_received_cb(client_task=said, fl_ctx=FLContext())
    ((frame, reason),) = come
    assert reason.startswith(problem)
    assert bool(reason) is bool(problem)
    assert frame == (None if problem else ANSWER)
    cancel()
    assert conductor.cancelled == [task]


def test_a_task_that_nvflare_gives_up_is_a_problem_and_one_that_is_done_is_none() -> None:
    conductor, come = Controlled(), list[str]()
    sites(conductor).assign("north", ANSWER, lambda frame, problem: come.append(problem))
    ((task, _),) = conductor.sent
    for status in (TaskCompletionStatus.OK, TaskCompletionStatus.CLIENT_DEAD):
        task.completion_status = status
        task.task_done_cb(task=task, fl_ctx=FLContext())
    assert come == ["NVFlare says client_dead"]


def test_an_aborted_job_ends_and_says_how_to_go_on() -> None:
    abort = Signal()
    found = sites(Controlled(), abort)
    abort.trigger(True)
    with pytest.raises(FedloomError, match="submit it again to go on with its run"):
        found.present()


def panic_at(folder: Path) -> str:
    """Why a controller cannot carry out what stands in its app."""
    context = FLContext()
    context.set_prop(FLContextKey.APP_ROOT, str(folder))
    conductor = Controlled()
    conductor.control_flow(Signal(), context)
    (reason,) = conductor.panics
    return reason


def test_what_cannot_be_carried_out_is_said_to_nvflare(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "fedloom.toml").write_text('run = "x"\nexperiment = "nonsense = 3"\n')
    assert "nonsense" in panic_at(tmp_path)


@pytest.mark.parametrize("run", ["/var/lib/theirs", "../theirs", "runs/../..", ""])
def test_whoever_submits_a_job_puts_nothing_beside_the_home_of_the_server_s_user(tmp_path: Path, run: str) -> None:
    charter = Charter(name="x", silos={"north": "ct"}, shape=(1, 28, 28), wire="nvflare")
    write_job(HostedRun(load_config("demo"), charter, RoundRules(), run), tmp_path / "job")
    assert panic_at(tmp_path / "job" / "server") == f"run = '{run}' is no folder below the home of this server's user"
