"""Processes that are kept running, the worker behind its socket."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.deployment import confinement, performing
from fedloom.deployment.charter import Charter
from fedloom.deployment.demo import write_records
from fedloom.deployment.direct.serving import DirectServing
from fedloom.deployment.directories import Invitation, ServerDirectory, ServerSettings, SiloDirectory
from fedloom.deployment.flower.grid_wire import FlowerWire
from fedloom.deployment.joining import Joining
from fedloom.deployment.link import ask_worker
from fedloom.deployment.processes import SOONEST, YOUNG, Child, Household, free_port, loading, locked, troubles
from fedloom.deployment.submissions import Submission
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.rules import RoundRules
from fedloom.errors import FedloomError
from fedloom.federation.building import build_federation
from fedloom.streams import Streams
from local_grid import Deployment, LocalGrid
from support import tiny_config, wait_for


def sleeper(tmp_path: Path, seconds: float) -> Child:
    return Child("sleeper", [sys.executable, "-c", f"import time; time.sleep({seconds})"], tmp_path / "log", os.environ)


def test_a_child_that_dies_is_started_again_at_the_next_look_and_after_a_pause_where_it_dies_again(
    tmp_path: Path,
) -> None:
    household = Household()
    try:
        child = household.add(sleeper(tmp_path, 60))
        assert household.tend() == []
        lives, pauses = list[int](), list[float]()
        for died in (1.0, 10.0, YOUNG + 1):  # seconds after it was started
            assert child.process is not None
            lives.append(child.process.pid)
            child.signal(signal.SIGKILL)
            child.process.wait()
            child.started = time.monotonic() - died
            assert household.tend() == [child]
            pauses.append(round(max(0.0, child.again - time.monotonic()), 1))
            child.again = min(child.again, time.monotonic() - 0.001)
            assert household.tend() == []
            assert child.process.poll() is None
        assert len({*lives, child.process.pid}) == 4
        assert pauses == [0.0, 1.0, 0.0]  # the last had lived
        assert child.pause == SOONEST
    finally:
        household.stop()
    assert child.process is not None
    assert child.process.poll() is not None


def test_what_is_imported_to_stay_is_no_matter_for_the_search_for_garbage() -> None:
    before = gc.get_freeze_count()
    try:
        with loading():
            assert not gc.isenabled()
            kept: list[list[int]] = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()


def test_what_a_child_warned_of_since_the_last_look_is_told_once(tmp_path: Path) -> None:
    """What stood in its log before it was started is no word of its own, and half a line is none yet."""
    log = tmp_path / "log"
    log.write_text("2026-01-01 00:00:00,000 WARNING old\n")
    said = "2026-01-01 00:00:01,000 INFO quiet\\n2026-01-01 00:00:02,000 WARNING new\\n2026-01-01 00:00:03,000 ERROR ha"
    household = Household()
    try:
        program = f"import time; print('{said}', end='', flush=True); time.sleep(60)"
        child = household.add(Child("talker", [sys.executable, "-c", program], log, os.environ))
        wait_for(lambda: log.read_text().endswith("ha"), "it has spoken")
        assert troubles(child.news()) == ["new"]
        with log.open("a") as more:
            more.write("lf\n")
        assert troubles(child.news()) == ["half"]
        assert child.news() == ""
    finally:
        household.stop()


def silo_home(tmp_path: Path) -> SiloDirectory:
    charter = Charter(name="x", address="h:1", silos={"north": "all"}, shape=(1, 2, 2))
    return SiloDirectory.create(tmp_path / "home", Invitation("north", charter, "none"))


def test_a_silo_that_cannot_start_all_its_processes_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = sleeper(tmp_path, 60)
    monkeypatch.setattr(Joining, "_worker", lambda _: child)
    monkeypatch.setattr(Joining, "_node", lambda _: Child("node", ["no such command"], tmp_path / "log", {}))
    joining = Joining(silo_home(tmp_path), tmp_path, print, apart=True)
    with pytest.raises(FileNotFoundError):
        joining.__enter__()
    assert child.process is not None
    assert child.process.poll() is not None
    assert not joining._runtime.exists()
    joining._locked().close()  # free again


def test_a_worker_that_outlives_its_command_still_counts_as_joined(tmp_path: Path) -> None:
    joining, household = Joining(silo_home(tmp_path), tmp_path, print), Household()
    lock = joining._locked()
    try:
        household.add(replace(sleeper(tmp_path, 60), holds=(lock.fileno(),)))
        lock.close()
        with pytest.raises(FedloomError, match="silo 'north' has joined already"):
            joining._locked()
    finally:
        household.stop()
    joining._locked().close()


def test_the_worker_writes_into_the_registry_and_the_node_does_not_see_its_key(
    tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement, "bubblewrap", lambda: "bwrap")
    children: list[Child] = []
    monkeypatch.setattr(Household, "add", lambda _, child: (children.append(child), child)[1])
    for number, own in enumerate((registry, tmp_path / "of a demonstration")):
        with Joining(silo_home(tmp_path / f"silo-{number}"), tmp_path, print, own, apart=True):
            worker, node = children[-2:]
        assert worker.environment["FEDLOOM_REGISTRY"] == str(own)
        assert f"--bind {own} {own}" in " ".join(worker.command)
        assert str(own) not in " ".join(node.command).replace(f"--ro-bind /dev/null {own}/registry.key", "")
        assert f"--ro-bind /dev/null {own}/registry.key" in " ".join(node.command)
        assert (own / "registry.key").is_file(), "what is hidden must be there"
    monkeypatch.setenv("FEDLOOM_REGISTRY", str(tmp_path / "by default"))
    assert Joining(silo_home(tmp_path / "third"), tmp_path, print).registry == tmp_path / "by default"


def test_a_server_is_served_once(tmp_path: Path) -> None:
    charter = Charter(name="x", address="h:1", silos={"north": "all"}, shape=(1, 2, 2))
    home = ServerDirectory.create(tmp_path / "server", charter, ServerSettings(), RoundRules())
    with (
        locked(home.path / "served.lock", ""),
        pytest.raises(FedloomError, match=f"{re.escape(str(home.path))} is served already"),
        DirectServing(home, print),
    ):
        pytest.fail("it was served twice")


@pytest.mark.parametrize(
    ("error", "problem"),
    [(FedloomError("too few"), "too few"), (KeyError("x"), "the server failed: KeyError: 'x'"), (None, "run already")],
)
def test_how_a_run_ended_is_always_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, problem: str
) -> None:
    """Without an error of its own the run is one that another process is busy with."""
    charter = Charter(name="x", address="h:1", silos={"north": "all"}, shape=(1, 2, 2))
    home = ServerDirectory.create(tmp_path / "server", charter, ServerSettings(), RoundRules())
    submission = Submission.create(home, tiny_config(), tmp_path / "run", "run-1")

    def train(*_: object) -> None:
        assert error is not None
        raise error

    monkeypatch.setattr(performing, "_train", train)
    monkeypatch.setattr(sys, "argv", sys.argv)
    other = home.path / "submissions" / ("run-1.lock" if error is None else "run-2.lock")
    with locked(other, ""):
        ended = performing.perform(home, submission.number, lambda _: FlowerWire(LocalGrid({})))
    assert ended == submission.problem
    assert submission.problem is not None
    assert problem in submission.problem


def test_stopping_ends_what_children_have_started(tmp_path: Path) -> None:
    program = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    household = Household()
    child = household.add(Child("parent", [sys.executable, "-c", program], tmp_path / "log", os.environ))
    try:
        wait_for(lambda: bool(child.last_words()), "it has started another")
    finally:
        household.stop()
    grandchild = int(child.last_words())
    wait_for(lambda: not _runs(grandchild), "what it has started has ended")


def _runs(number: int) -> bool:
    """Whether a process is more than a number that nobody has asked about yet."""
    try:
        return Path(f"/proc/{number}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while, it was read
        return False


def test_the_worker_answers_through_its_socket_and_keeps_everything_loaded(tmp_path: Path) -> None:
    """The process that asks loads no torch; a second question is answered by the same worker."""
    config = tiny_config("method.name=fedvae", "data.silos=1", "data.records_per_silo=16", "engine.name=reference")
    federation = build_federation(config.data, Streams(config.seed))
    charter = Charter(
        name="x",
        address="h:1",
        silos={silo.name: federation.groups[silo.groups[0]] for silo in federation.silos},
        shape=federation.shape,
        classes=federation.classes,
    )
    home = SiloDirectory.create(tmp_path / "home", Invitation("mnist-0", charter, "none"))
    (home.path / "policy.toml").write_text('methods = ["fedvae"]\nblocks = ["encoder", "decoder"]\nprivacy = "none"\n')
    write_records(tmp_path / "own.npz", federation, federation.silos[0].train, federation.test.of_group(0))
    deployment = Deployment(tmp_path / "local", config, federation)
    taken: list[Frame] = []
    own = deployment.grid.handlers["mnist-0"]
    deployment.grid.handlers["mnist-0"] = lambda frame: (taken.append(frame), own(frame))[1]
    deployment.run()

    socket = Path(os.path.relpath(tmp_path / "w"))
    command = [
        sys.executable,
        "-m",
        "fedloom.deployment.worker_process",
        str(home.path),
        str(tmp_path / "own.npz"),
        str(socket),
    ]
    worker = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        answers = [ask_worker(socket, frame) for frame in taken]
        assert "the server runs fedloom 0" in ask_worker(socket, Frame({"version": "0"})).header["reason"]
        assert worker.poll() is None
    finally:
        worker.terminate()
        worker.wait()
    assert [answer.parts for answer in answers] == [own(frame).parts for frame in taken]
    assert [answer.kind for answer in answers] == ["update", "update"]


def test_a_free_port_is_given_once_and_never_to_an_outgoing_connection() -> None:
    """Between the choice of a port and its use whole processes are started."""
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    assert max(ports) < 32_768  # where Linux begins, and others later


def test_a_simulation_needs_no_flower() -> None:
    program = "import sys; sys.modules['flwr'] = None; import fedloom.cli, fedloom.experiment, fedloom.engines.choice"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("module", ["direct.silo_process", "direct.hub_process", "flower.app"])
def test_who_sees_no_records_needs_no_torch(module: str) -> None:
    program = f"import sys, fedloom.deployment.{module}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_worker_that_is_not_there_is_waited_for_only_a_while(tmp_path: Path) -> None:
    with pytest.raises(FedloomError, match="the silo's worker does not answer"):
        ask_worker(tmp_path / "nobody", Frame({}), patience=0.1)
