"""Runs in the background: begun without a terminal, looked after by ``fedloom status``, ended by ``fedloom stop``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.output import Json, RunDir, plural, say, say_facts, say_guarantee, show, show_json, table
from fedloom.errors import RunFolderError
from fedloom.runs import background
from fedloom.runs.at_work import worker_of
from fedloom.runs.background import LOG, begin

if TYPE_CHECKING:
    from fedloom.studio.run_summary import RunSummary

RUNS = Path("runs")
LAST = 5  # lines of it
STOPPED = "stopped"


def detach(words: Sequence[str], folder: Path) -> None:
    """Start a command on a run folder in the background, and say how to look after it, or why it failed."""
    begun = begin(words, folder)
    if begun.exit_code is None:
        say(f"runs in the background as process {begun.process}; its output is in {begun.log}")
        say_facts({"next": f"fedloom status {folder}", "or": f"fedloom stop {folder}"})
        return
    typer.echo(begun.said, err=bool(begun.exit_code), nl=False)
    raise typer.Exit(begun.exit_code)


def status(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="A run, or the folder that runs lie in.")] = RUNS,
    as_json: Json = False,
) -> None:
    """Show how far runs are, whether a process is at work on them, and what is left."""
    from fedloom.studio.catalogue import Catalogue
    from fedloom.studio.run_summary import run_summary_of

    if not folder.is_dir():
        raise RunFolderError(f"there is no folder {folder}; give a run folder, or the folder that runs lie in")
    found = [run_summary_of(entry) for entry in Catalogue(folder.resolve()).entries().values()]
    if not found:
        raise RunFolderError(f"{folder} holds no run; 'fedloom run' makes some")
    if as_json:
        show_json({"runs": [_described(summary) for summary in found]})
    elif len(found) == 1 and (folder / "run.toml").is_file():
        _print_one(found[0], folder)
    else:
        _print_all(found)


def _described(summary: RunSummary) -> dict[str, Any]:
    worker = worker_of(summary.entry.path)
    return {
        "run": summary.entry.name,
        "state": state_of(summary),
        "process": worker.process if worker else None,
        "machine": worker.machine if worker else None,
        "method": summary.method,
        "rounds": {"done": summary.rounds_done, "planned": summary.rounds_planned},
        "seconds_left": None if summary.ended else summary.seconds_left,
        "best": {best.metric: best.value for best in summary.best},
        "privacy": summary.privacy,
        "problem": summary.problem,
    }


def state_of(summary: RunSummary) -> str:
    """How a run is: running, stopped, finished, diverged or unreadable."""
    if summary.problem or summary.ended:
        return summary.ended or "unreadable"
    return "running" if worker_of(summary.entry.path) else STOPPED


def _print_all(found: Sequence[RunSummary]) -> None:
    rows = table("run", "state", "rounds", "left", "at best", "privacy", right=("rounds", "left"))
    for summary in found:
        best = summary.best[0] if summary.best else None
        rows.add_row(
            summary.entry.name,
            state_of(summary),
            f"{summary.rounds_done}/{summary.rounds_planned}",
            summary.time_left,
            f"{best.title} {best.value:.4g}" if best else "",
            summary.privacy,
        )
    show(rows)


def _print_one(summary: RunSummary, folder: Path) -> None:
    if summary.problem:
        raise RunFolderError(summary.problem)
    found, path = _described(summary), summary.entry.path
    rounds = f"{summary.rounds_done} of {plural(summary.rounds_planned, 'round')} done"
    left = f", {summary.time_left} left" if summary.time_left else ""
    at = f" (process {found['process']} on {found['machine']})" if found["process"] else ""
    say(f"{summary.method} is {found['state']}{at}, {rounds}{left}")
    from fedloom.runs.folder import RunFolder

    say_guarantee(RunFolder.open(path))
    if (path / LOG).is_file():
        lines = (path / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        say("\n".join(["", *lines[-LAST:]]))
    nexts = {"running": "stop", STOPPED: "resume"}
    say_facts({"next": f"fedloom {nexts.get(found['state'], 'inspect')} {folder}"})


def stop(folder: RunDir) -> None:
    """End the process that is at work on a run, as Ctrl-C does: all up to the last checkpoint is kept."""
    from fedloom.runs.folder import RunFolder

    RunFolder.open(folder)
    stopped = background.stop(folder)
    say(f"stopped; 'fedloom resume {folder}' goes on" if stopped else f"no process is at work on {folder}")
