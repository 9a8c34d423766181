"""Carries out what the coordinator hands in, each run in a process of its own; torch is loaded once, and forked.

A run whose process dies goes on from its checkpoint, without being told. One that dies again and again without a
round's progress is given up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fedloom.deployment.direct.parts import PartStore
from fedloom.deployment.direct.wire import DirectWire, HubCalls
from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.performing import perform
from fedloom.deployment.processes import is_locked
from fedloom.deployment.submissions import Submission
from fedloom.engines.remote.wire import Wire
from fedloom.runs.folder import RunFolder

log = logging.getLogger(__name__)
POLL = 0.1  # seconds between two looks at what is handed in
DEATHS = 5  # without a round's progress, after which a run is given up


@dataclass
class Executor:
    """The runs of a server."""

    home: ServerDirectory
    children: dict[int, Submission] = field(default_factory=dict)  # by process
    stopped: set[int] = field(default_factory=set)  # processes that were told to stop
    deaths: dict[str, tuple[int, int]] = field(default_factory=dict)  # by run: rounds done, deaths since then

    def look(self) -> Submission | None:
        """Bury the dead, stop what is to be stopped; the next run to carry out, if there is one."""
        while self.children:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            self._bury(self.children.pop(process), status)
        for process, submission in self.children.items():
            if submission.stopping.is_file() and process not in self.stopped:
                self.stopped.add(process)
                os.kill(process, signal.SIGINT)
        at_work = {submission.run for submission in self.children.values()}
        for submission in Submission.unfinished(self.home):
            if submission.run not in at_work and not is_locked(submission.lock):  # one may outlive its executor
                if submission.stopping.is_file():
                    submission.end("the run was stopped")
                    continue
                return submission
        return None

    def _bury(self, submission: Submission, status: int) -> None:
        if submission.problem is not None:
            return
        done = RunFolder.open(submission.folder).rounds_done if submission.folder.is_dir() else 0
        before, deaths = self.deaths.get(submission.run, (done, 0))
        deaths = deaths + 1 if before == done else 1
        self.deaths[submission.run] = (done, deaths)
        if deaths < DEATHS:
            log.warning("the process of a run died (%s); it goes on from round %s", status, done)
        else:
            submission.end(f"the process of the run died {deaths} times in a row; the server's log may say why")


def wiring(home: ServerDirectory, submission: Submission) -> Wire:
    """The direct wire in the name of a submission's run."""
    return DirectWire(submission.run, HubCalls(lambda: home.door.socket), PartStore(home.post / "parts"))


def carry_out(home: ServerDirectory, submission: Submission) -> None:
    """A run from where it stands to its end, after which the hub keeps nothing of it."""
    if not perform(home, submission.number, partial(wiring, home)):
        HubCalls(lambda: home.door.socket).call("finished", run=submission.run)


def main(folder: str) -> None:
    """Look for runs until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; 'serve' stops this in order
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    executor = Executor(ServerDirectory.open(Path(folder)))
    while True:
        if not (submission := executor.look()):
            time.sleep(POLL)
            continue
        process = os.fork()
        if process:
            executor.children[process] = submission
            continue
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            carry_out(ServerDirectory.open(Path(folder)), submission)  # as its files say now
        return


if __name__ == "__main__":
    main(*sys.argv[1:])
