"""What a forged server can have a hardened NVFlare site do: NVFlare's own dispatch, called as it is."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs the extra 'nvflare'")

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.private.admin_defs import Message
from nvflare.private.defs import RequestHeader, SysCommandTopic, TrainingTopic, new_cell_message
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.security.security import FLAuthorizer

from fedloom.deployment.nvflare.executor import SiloExecutor
from fedloom.deployment.nvflare.guard import TOPICS, SiteGuard, guarded, objection
from fedloom.deployment.nvflare.job import CHARTER, FRAME, SITE_CONFIG, SITE_TEXT, TASK
from fedloom.deployment.nvflare.kit import RIGHTS, ROLES
from fedloom.engines.remote.frames import Frame

ALL = tuple(ClientRequestProcessors.request_processors)
SECRET = "a patient's name"
NUMBER = "5e1f3c9a-0b7d-4c55-9d0e-2a6b8f4c1d37"


@pytest.fixture
def processors() -> Iterator[list[Any]]:
    """NVFlare's own list, which the guard changes in place."""
    yield ClientRequestProcessors.request_processors
    ClientRequestProcessors.request_processors[:] = ALL


@pytest.fixture
def rights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that a hardened kit gives: none that matter."""
    policy = {"format_version": "1.0", "permissions": dict.fromkeys(ROLES, RIGHTS)}
    monkeypatch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("hospital", policy))
    monkeypatch.setattr(AuditService, "the_auditor", None)
    AuditService.initialize(str(tmp_path / "audit.txt"))


class Cell:
    """Keeps what the agent registers, in place of a connection."""

    def register_request_cb(self, channel: str, topic: str, cb: Any) -> None:
        self.call = cb


class Engine:
    def new_context(self) -> Any:
        return nullcontext(FLContext())

    def fire_event(self, event: str, fl_ctx: FLContext) -> None:
        """Nobody listens."""


def asked(processors: list[Any], topic: str, body: Any, **headers: str) -> str:
    """What a site answers to a message of the server's, by NVFlare's own dispatch."""
    cell = Cell()
    agent = FedAdminAgent("admin_agent", cell, Engine())
    for processor in processors:
        agent.register_processor(processor)
    message = Message(topic=topic, body=body)
    for key, value in headers.items():
        message.set_header(key, value)
    return str(cell.call(new_cell_message({}, message)).payload.body)


def test_a_file_that_a_forged_server_reads_at_a_plain_site_is_refused_at_a_hardened_one(
    processors: list[Any], rights: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("records.csv").write_text(SECRET)
    as_asked = {
        RequestHeader.ADMIN_COMMAND: "cat",
        RequestHeader.REQUIRE_AUTHZ: "true",
        RequestHeader.USER_ROLE: "project_admin",
    }
    shell = (SysCommandTopic.SHELL, "cat records.csv")
    assert "not authorized" in asked(processors, *shell, **as_asked)  # NVFlare's rights hold where it asks for them
    assert SECRET in asked(processors, *shell)  # a server that does not say what it asks is not asked for rights
    assert SECRET in asked(processors, *shell, **{**as_asked, RequestHeader.USER_ROLE: "super"})
    SiteGuard().handle_event(EventType.SYSTEM_BOOTSTRAP, FLContext())
    for headers in ({}, as_asked, {**as_asked, RequestHeader.USER_ROLE: "super"}):
        assert asked(processors, *shell, **headers) == "invalid_request"


def test_of_nvflare_s_commands_those_of_a_job_are_left(processors: list[Any]) -> None:
    every = {topic for processor in processors for topic in processor.get_topics()}
    SiteGuard().handle_event(EventType.SYSTEM_BOOTSTRAP, FLContext())
    left = {topic for processor in processors for topic in processor.get_topics()}
    assert left == TOPICS
    assert {SysCommandTopic.SHELL, TrainingTopic.CONFIGURE_JOB_LOG, SysCommandTopic.REPORT_ENV} <= every - left
    assert guarded(list(processors)) == processors  # a second time nothing more happens


def test_a_guard_that_does_not_know_this_nvflare_lets_no_site_start(
    processors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvflare.__version__", "2.10.0")
    with pytest.raises(Exception, match=r"the guard knows NVFlare 2\.9\.0, and this is 2\.10\.0"):
        SiteGuard().handle_event(EventType.SYSTEM_BOOTSTRAP, FLContext())


def archive(**files: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as writer:
        for name, content in {SITE_CONFIG: SITE_TEXT, **files}.items():
            writer.writestr(name, content)
    return data.getvalue()


OTHER = SITE_TEXT.replace(b"fedloom.deployment.nvflare.executor.SiloExecutor", b"subprocess.Popen")
ARGUED = SITE_TEXT.replace(b'"args": {}', b'"args": {"data": "/etc"}')


@pytest.mark.parametrize(
    "app",
    [
        archive(**{"custom/evil.py": b"import os"}),
        archive(**{SITE_CONFIG: OTHER}),
        archive(**{SITE_CONFIG: ARGUED}),
        archive(**{"custom/": b""}),
        archive(**{"config/config_fed_client.conf": b"{}"}),
        archive(**{"../local/resources.json": b"{}"}),
        archive(**{"config/.__nvfl_sig.json": bytes(2**20 + 1)}),
        b"no archive",
        None,
    ],
    ids=[
        "code",
        "other class",
        "arguments",
        "folder",
        "second configuration",
        "outside",
        "huge",
        "no archive",
        "nothing",
    ],
)
def test_any_other_app_than_fedloom_s_is_refused_before_it_is_written(
    processors: list[Any], rights: None, app: object
) -> None:
    SiteGuard().handle_event(EventType.SYSTEM_BOOTSTRAP, FLContext())
    meta = json.dumps({"submitter_role": "super"})
    said = asked(processors, TrainingTopic.DEPLOY, app, **{RequestHeader.JOB_META: meta, RequestHeader.JOB_ID: NUMBER})
    assert "this site runs fedloom's job alone" in said


@pytest.mark.parametrize("topic", [TrainingTopic.DEPLOY, TrainingTopic.START_JOB])
@pytest.mark.parametrize("job", ["local", "startup", "", f"{NUMBER} --set x", f"{NUMBER}\n"])
def test_a_job_whose_number_is_none_takes_no_folder_of_the_kit(
    processors: list[Any], rights: None, topic: str, job: str
) -> None:
    SiteGuard().handle_event(EventType.SYSTEM_BOOTSTRAP, FLContext())
    assert "by NVFlare's own numbers" in asked(processors, topic, archive(), **{RequestHeader.JOB_ID: job})
    passed = asked(processors, topic, archive(), **{RequestHeader.JOB_ID: NUMBER})
    assert "engine must be ClientEngineInternalSpec" in passed  # it is NVFlare's turn


def test_without_the_guard_a_job_by_the_name_of_a_folder_takes_its_place(rights: None, tmp_path: Path) -> None:
    """Why a job's number is looked at: NVFlare takes any name, and empties that folder first."""
    settings = tmp_path / "local" / "resources.json"
    for file in (settings, tmp_path / "startup" / "fed_client.json"):
        file.parent.mkdir()
        file.write_text("{}")
    workspace = Workspace(str(tmp_path), "north")
    assert not AppDeployer().deploy(workspace, "local", {"name": "fedloom"}, "app", archive(), FLContext())
    assert not settings.exists()


def test_a_role_of_nvflare_s_own_passes_its_rule_against_code_and_not_the_guard(rights: None) -> None:
    """Why ``byoc: none`` alone is not enough: the submitter's role is what the server says it is."""
    code = {"byoc": True}
    assert AppAuthzService.authorize_app_info(code, "mallory", "others", "project_admin") == (
        False,
        "BYOC not permitted",
    )
    assert AppAuthzService.authorize_app_info(code, "mallory", "others", "super") == (True, "")
    assert objection(archive(**{"custom/evil.py": b""})) == f"it holds {SITE_CONFIG}, custom/evil.py"
    assert objection(archive()) == objection(archive(**{".__nvfl_sig.json": b"{}"})) == ""


class Site:
    """A job's process at a site, as far as an executor asks for it."""

    def __init__(self, local: Path) -> None:
        self.local = local

    def get_site_config_dir(self) -> str:
        return str(self.local)


def answer(local: Path, name: str, data: dict[str, Any], task: str = TASK) -> Shareable:
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Site(local))
    context.set_prop(ReservedKey.IDENTITY_NAME, name)
    shareable = Shareable()
    shareable.update(data)
    executor = SiloExecutor()
    found = executor.execute(task, shareable, context, Signal())
    executor.handle_event(EventType.END_RUN, context)
    return found


def test_an_executor_goes_where_the_site_s_own_file_says_and_nowhere_else(tmp_path: Path) -> None:
    frame = Frame({"kind": "task", "version": "0"}).to_bytes()
    charter = 'name = "x"\nshape = [1]\nwire = "nvflare"\n[silos]\nnorth = "ct"\n'
    task = {FRAME: frame, CHARTER: charter, "home": str(tmp_path / "theirs"), "data": "/etc/passwd"}
    told = Frame.of_bytes(answer(tmp_path, "north", task)[FRAME])
    assert told.header["reason"] == f"this site's {tmp_path.name}/fedloom.toml does not say 'home'"
    (tmp_path / "fedloom.toml").write_text(f'home = "{tmp_path / "ours"}"\ndata = "{tmp_path / "none.npz"}"\n')
    told = Frame.of_bytes(answer(tmp_path, "north", task)[FRAME])
    assert told.header["reason"] == "silo 'north' failed; its own log says why"
    assert "unknown silo 'west'" in Frame.of_bytes(answer(tmp_path, "west", task)[FRAME]).header["reason"]
    assert (tmp_path / "ours" / "silo.toml").is_file()
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("data", [{}, {FRAME: b"x", CHARTER: ""}, {FRAME: 3, CHARTER: ""}])
def test_a_task_that_is_none_of_fedloom_s_is_not_taken(tmp_path: Path, data: dict[str, Any]) -> None:
    assert answer(tmp_path, "north", data).get_return_code() == "BAD_TASK_DATA"
