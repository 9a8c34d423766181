"""Runs that are handed in: found, gone on with when their process dies, and given up when that does not help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.deployment.charter import Charter
from fedloom.deployment.direct.executor import DEATHS, Executor
from fedloom.deployment.directories import ServerDirectory, ServerSettings
from fedloom.deployment.processes import locked
from fedloom.deployment.submissions import Submission
from fedloom.engines.remote.rules import RoundRules
from support import tiny_config, wait_for


@pytest.fixture
def home(tmp_path: Path) -> ServerDirectory:
    charter = Charter(name="x", address="h:1", silos={"north": "all"}, shape=(1,))
    return ServerDirectory.create(tmp_path / "server", charter, ServerSettings(), RoundRules())


def handed_in(home: ServerDirectory, run: str = "") -> Submission:
    return Submission.create(home, tiny_config(), home.path / "run", run)


def process(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program])


def test_a_run_whose_process_dies_goes_on_and_one_that_keeps_dying_is_given_up(home: ServerDirectory) -> None:
    executor, submission = Executor(home), handed_in(home)
    for death in range(1, DEATHS + 1):
        found = executor.look()
        assert found is not None
        assert (found.number, submission.problem) == (submission.number, None), f"death {death}"
        child = process("import os; os._exit(9)")
        executor.children[child.pid] = found
        assert executor.look() is None or not executor.children  # it is under way, or over already
        wait_for(lambda: (executor.look(), not executor.children)[1], "the dead is buried", 20)
    assert executor.look() is None
    assert f"the process of the run died {DEATHS} times in a row" in str(submission.problem)


def test_a_run_that_ends_by_itself_is_not_begun_again(home: ServerDirectory) -> None:
    executor, submission = Executor(home), handed_in(home)
    child = process("pass")
    executor.children[child.pid] = submission
    submission.end("")
    wait_for(lambda: (executor.look(), not executor.children)[1], "the dead is buried", 20)
    assert executor.look() is None
    assert submission.problem == ""


def test_a_run_that_is_to_stop_is_interrupted_once(home: ServerDirectory, tmp_path: Path) -> None:
    executor, submission = Executor(home), handed_in(home)
    program = "import signal, sys, time; signal.signal(2, lambda *_: print('x', flush=True)); print('r', flush=True)"
    child = subprocess.Popen([sys.executable, "-c", f"{program}; time.sleep(60)"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"r\n"
    executor.children[child.pid] = submission
    submission.stopping.write_bytes(b"")
    try:
        for _ in range(5):
            assert executor.look() is None
        assert child.stdout.readline() == b"x\n"
        assert executor.stopped == {child.pid}
    finally:
        child.kill()
        assert child.stdout.read() == b""
        child.stdout.close()
        child.returncode = child.wait()


def test_a_run_that_was_stopped_before_it_began_ends_and_one_under_a_lock_waits(home: ServerDirectory) -> None:
    executor, submission = Executor(home), handed_in(home)
    with locked(submission.lock, ""):
        assert executor.look() is None  # the process of an executor that died goes on with it
    submission.stopping.write_bytes(b"")
    assert executor.look() is None
    assert submission.problem == "the run was stopped"


def test_a_run_that_is_handed_in_anew_takes_the_place_of_what_nobody_carries_out(home: ServerDirectory) -> None:
    first = handed_in(home, "run-1")
    other = handed_in(home, "run-2")
    second = handed_in(home, "run-1")
    assert first.problem == "it was handed in anew"
    assert [each.number for each in Submission.unfinished(home)] == [other.number, second.number]
    with locked(second.lock, ""):
        handed_in(home, "run-1")
    assert second.problem is None
