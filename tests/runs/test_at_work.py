"""One process at a time is at work on a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.errors import RunFolderError
from fedloom.experiment import Observer, resume, train
from fedloom.runs.at_work import FILE, at_work, check_idle, is_abandoned, worker_of
from support import tiny_config


def test_a_second_one_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    assert worker_of(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    with at_work(tmp_path):
        found = worker_of(tmp_path)
        assert found is not None
        assert (found.process, found.is_here) == (os.getpid(), True)
        with pytest.raises(RunFolderError, match=rf"process {os.getpid()} .* is at work on .*'fedloom stop"):
            check_idle(tmp_path)
        with pytest.raises(RunFolderError, match="is at work on"), at_work(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
    check_idle(tmp_path)


def test_who_was_interrupted_leaves_word_that_nobody_is_at_work(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), at_work(tmp_path):
        raise KeyboardInterrupt
    assert is_abandoned(tmp_path)
    with at_work(tmp_path):
        assert not is_abandoned(tmp_path)
    assert not is_abandoned(tmp_path)  # it has ended by itself


def test_who_was_killed_leaves_a_file_and_no_lock(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from fedloom.runs.at_work import at_work
with at_work(Path({str(tmp_path)!r})):
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert (tmp_path / FILE).is_file()
    assert worker_of(tmp_path) is None
    with at_work(tmp_path):
        assert worker_of(tmp_path) is not None


def test_a_run_cannot_be_resumed_while_it_runs(tmp_path: Path) -> None:
    """The second would drop what the first has logged and not yet kept."""
    said: list[str] = []

    class Other(Observer):
        def round_done(self, report: object, metrics: object) -> None:
            with pytest.raises(RunFolderError, match="is at work on") as caught:
                resume(tmp_path / "run")
            said.append(str(caught.value))

    run = train(tiny_config(), tmp_path / "run", observer=Other())
    assert len(said) == 2
    assert run.folder.status["state"] == "finished"
    assert not (run.folder.path / FILE).exists()
