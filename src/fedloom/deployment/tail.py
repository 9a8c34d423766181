"""Starting a run at a server and following it to its end, by what it writes into its folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedloom.config import Config
from fedloom.deployment.direct.conductor import DirectConductor
from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.gathering import unsigned
from fedloom.deployment.submissions import Submission
from fedloom.errors import ConfigError, FedloomError, RunFolderError
from fedloom.runs.files import read_lines
from fedloom.runs.folder import RunFolder

TICK, ASK_SERVER = 0.5, 10.0  # seconds
TROUBLE = {"failed", "refused", "rejected", "late", "missing", "unstated"}


def run_at(home: ServerDirectory, config: Config, folder: Path, say: Callable[[str], None]) -> None:
    """A new run, into a folder that must not be there yet."""
    if folder.exists():
        raise RunFolderError(f"{folder} exists already; choose another --out")
    config.privacy.check_mechanism()
    _check(home, config)
    _follow(home, Submission.create(home, config, folder), say)
    _say_who_is_silent(home, folder, say)


def resume_at(home: ServerDirectory, folder: RunFolder, say: Callable[[str], None]) -> None:
    """Go on with a run that stopped: a new one for the executor, the same for the silos."""
    run = folder.environment.get("engine_choice", {}).get("run", "")
    if not run:
        raise ConfigError(f"{folder.path} was not made by a federation; resume it without --federation")
    _check(home, folder.config)
    _follow(home, Submission.create(home, folder.config, folder.path, run), say)
    _say_who_is_silent(home, folder.path, say)


def _say_who_is_silent(home: ServerDirectory, folder: Path, say: Callable[[str], None]) -> None:
    lacking = unsigned(RunFolder.open(folder), tuple(home.charter.silos))
    if lacking:
        silos = ", ".join(f"'{silo}'" for silo in lacking)
        say(f"no signed statement of {silos} yet; 'fedloom resume {folder} --federation {home.path}' asks again")


def _check(home: ServerDirectory, config: Config) -> None:
    """Find a person's mistake here and now, not in a process of the server."""
    from fedloom.engines.charging import shares_noise
    from fedloom.engines.masked_sums import check_shared
    from fedloom.experiment import Experiment

    if config.data.layout != "federated" or config.audit.canaries:
        raise ConfigError("a federation has no centralised layout (data.layout) and no canaries (audit.canaries)")
    experiment = Experiment.of(config, home.charter.at_the_server())
    if shares_noise(config):
        check_shared(config, experiment.federation, experiment.method, home.charter.records)
    if not DirectConductor(home).answers:
        raise FedloomError(f"no server answers for {home.path}; start it with 'fedloom federation serve {home.path}'")


def _follow(home: ServerDirectory, submission: Submission, say: Callable[[str], None]) -> None:
    conductor = DirectConductor(home)
    conductor.start(submission)
    rounds = _new_lines(submission.folder / "metrics.jsonl")
    events = _new_lines(submission.folder / "silos.jsonl")
    asked = time.monotonic()
    try:
        while True:
            ended = submission.problem is not None
            for event in next(events):
                if event["event"] in TROUBLE:
                    reason = f": {event['reason']}" if event.get("reason") else ""
                    say(f"round {event['round']}  silo '{event['silo']}' {event['event']}{reason}")
            for row in next(rounds):
                said = f"round {row['round']}/{submission.config.rounds}"
                say(f"{said}  {len(row['participants'])} silos, {row['seconds']:.1f} s")
            if ended:
                break
            if time.monotonic() - asked > ASK_SERVER:
                asked = time.monotonic()
                if (status := conductor.ending()) and submission.problem is None:
                    raise FedloomError(
                        f"the run's process at the server has ended ({status}; {home.logs / 'executor.log'} says "
                        f"more); 'fedloom resume {submission.folder} --federation {home.path}' goes on"
                    )
            time.sleep(TICK)
    except KeyboardInterrupt:
        conductor.stop()
        raise
    if submission.problem:
        raise FedloomError(submission.problem)


def _new_lines(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The lines that a log has got since it was last asked; those that were there at first are not new."""
    seen = len(read_lines(path))
    while True:
        rows = read_lines(path)
        yield rows[min(seen, len(rows)) :]
        seen = len(rows)  # fewer than before where a resumed run has dropped some
