"""``fedloom run`` and ``fedloom resume``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.metrics import last_metrics, last_terms, metrics_table, number
from fedloom.cli.output import Json, Overrides, clock, plural, say, say_facts, show, show_json, terminal
from fedloom.config import load_config

if TYPE_CHECKING:
    from fedloom.experiment import Run

INTERRUPTED = 130


def run(
    source: Annotated[str, typer.Argument(metavar="PRESET-or-FILE.toml", show_default=False)],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The new run folder.", show_default="runs/<name>-<method>-s<seed>"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train what a preset or a file describes, into a new run folder."""
    config = load_config(source, overrides or ())
    with terminal().status("loading"):
        from fedloom.cli.progress import RoundProgress
        from fedloom.experiment import file_name, train
    folder = out or Path("runs") / file_name(f"{config.name}-{config.method.name}-s{config.seed}")
    with _stoppable(folder), RoundProgress(terminal()) as progress:
        finished = train(config, folder, observer=progress)
    _summarise(finished, as_json)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Go on with a stopped run, exactly as if it had not stopped."""
    with terminal().status("loading"):
        from fedloom import experiment
        from fedloom.cli.progress import RoundProgress
    before = experiment.load(folder)
    with _stoppable(folder), RoundProgress(terminal()) as progress:
        nothing_left = before.folder.rounds_done >= before.config.rounds
        finished = experiment.resume(folder, observer=progress)
    if nothing_left and not as_json:
        say(f"{folder} is finished: all {plural(before.config.rounds, 'round')} are done, nothing is left to resume")
    else:
        _summarise(finished, as_json)


@contextmanager
def _stoppable(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        begun = (folder / "run.toml").is_file()
        goes_on = f"`fedloom resume {folder}` goes on" if begun else "nothing had been written yet"
        typer.echo(f"stopped; {goes_on}", err=True)
        raise typer.Exit(INTERRUPTED) from error


def _summarise(run: Run, as_json: bool) -> None:
    summary = _summary(run)
    if as_json:
        show_json(summary)
        return
    took = clock(summary["seconds"])
    say(f"{summary['name']}: {plural(summary['rounds'], 'round')} of {summary['method']} in {took}")
    if summary["metrics"]:
        say("")
        show(metrics_table(summary["metrics"]))
        say("")
    folder, group = summary["folder"], summary["groups"][0]
    say_facts(
        {
            "engine": summary["engine"],
            "loss": "  ".join(f"{name} {number(value)}" for name, value in summary["loss"].items()),
            "grids": summary["samples"] or "none: the records are no images",
            "next": f"fedloom inspect {folder}",
            "or": f"fedloom sample {folder} --group {group} --out grid.png",
        }
    )


def _summary(run: Run) -> dict[str, Any]:
    samples = sorted((run.folder.path / "samples").glob("round-*"))
    return {
        "folder": str(run.folder.path),
        "name": run.config.name,
        "method": run.config.method.name,
        "rounds": run.folder.rounds_done,
        "seconds": sum(row["seconds"] for row in run.metrics()),
        "engine": run.folder.environment.get("engine", ""),
        "groups": list(run.generator().groups),
        "loss": last_terms(run),
        "metrics": last_metrics(run),
        "samples": str(samples[-1]) if samples else None,
    }
