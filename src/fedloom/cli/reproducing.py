"""``fedloom reproduce``: a paper's tables, obtained beside published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.clusters import Jobs, On, Sbatch, cluster_of
from fedloom.cli.output import Json, plural, privacy_of, say, say_guarantee, show_json, terminal
from fedloom.cli.sweeping import complain_of
from fedloom.cluster import Cluster

if TYPE_CHECKING:
    from fedloom.cli.progress import RoundProgress
    from fedloom.reproduction.tables import Table
    from fedloom.runs.folder import RunFolder
    from fedloom.sweep import Outcome, Trial

INTERRUPTED = 130


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(metavar="PAPER/TABLE...", help="'fedloom list tables' names them.", show_default=False),
    ],
    rows: Annotated[
        list[str] | None, typer.Option(help="Only this row, or rows whose names begin so; may be repeated.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions, with the seeds 0, 1, ...")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="The folder of all runs; what is there already is gone on with.")] = Path(
        "runs/reproduce"
    ),
    papers: Annotated[Path, typer.Option(help="Where results, figures and READMEs lie.")] = Path("papers"),
    pack: Annotated[str, typer.Option(help="Runs of equal shape in one program: auto, off or a number.")] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the device.")] = 1,
    minutes: Annotated[float, typer.Option(min=0, help="Stop after so long; 0: never.")] = 0.0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="data.path or a setting of engine.")
    ] = None,
    inception: Annotated[
        Path | None, typer.Option(help="Weights of the Inception network of 2015: the standard FID is measured too.")
    ] = None,
    on: On = None,
    jobs: Jobs = 0,
    sbatch: Sbatch = None,
    render: Annotated[bool, typer.Option("--render", help="Run nothing; write the tables anew from results.")] = False,
    as_json: Json = False,
) -> None:
    """Run the rows of a paper's tables, keep every result, and write the tables into the paper's page."""
    cluster = cluster_of(on, out, jobs, sbatch or (), alone=workers > 1 or minutes > 0)
    with terminal().status("loading"):
        from fedloom.reproduction.rendering import render_pages
        from fedloom.reproduction.tables import load_table

        tables = [load_table(name) for name in names]
    outcomes: dict[str, Outcome] = {}
    if not render:
        wanted = [f"engine.device={device}", *(settings or [])]
        outcomes = _run(tables, papers, out, rows or [], seeds, wanted, (pack, workers, minutes), inception, cluster)
    written: list[str] = []
    for paper in dict.fromkeys(table.paper for table in tables):
        pages = render_pages(papers / paper, [table for table in tables if table.paper == paper])
        written += [str(page) for page in pages]
    _show(outcomes, _folders(out, outcomes), written, as_json)
    if any(outcome.state == "failed" for outcome in outcomes.values()):
        raise typer.Exit(1)


def _run(
    tables: Sequence[Table],
    papers: Path,
    out: Path,
    rows: Sequence[str],
    seeds: int,
    settings: Sequence[str],
    effort: tuple[str, int, float],
    inception: Path | None,
    cluster: Cluster | None,
) -> dict[str, Outcome]:
    console = terminal()
    with console.status("loading"):
        from fedloom.cli.progress import RoundProgress
        from fedloom.reproduction.bounds import write_bounds
        from fedloom.reproduction.rendering import page_of
        from fedloom.reproduction.running import Work, carry_out, tasks_of
        from fedloom.sweep import pack_of

        for table in tables:
            page_of(papers / table.paper, table)  # complains before anything starts
            write_bounds(table, papers)
        pack, workers, minutes = effort
        weights = str(inception) if inception else ""
        tasks = tasks_of(tables, papers, rows=rows, seeds=seeds, more=settings, inception=weights)
        work = Work(out, pack_of(pack), weights)
    names = [task.trial.name for task in tasks]

    @contextmanager
    def observe(packed: Sequence[Trial]) -> Iterator[RoundProgress]:
        if console.is_terminal:
            numbers = ", ".join(str(1 + names.index(trial.name)) for trial in packed)
            text = f"[{numbers}/{len(names)}] {', '.join(trial.name for trial in packed)}"
            console.print(text, markup=False, style="bold")
        with RoundProgress(console, runs=len(packed)) as progress:
            yield progress

    try:
        seconds, say = 60 * minutes or float("inf"), partial(typer.echo, err=True)
        return carry_out(tasks, work, observe, workers=workers, seconds=seconds, cluster=cluster, say=say)
    except KeyboardInterrupt as error:
        typer.echo("stopped; the same command goes on", err=True)
        raise typer.Exit(INTERRUPTED) from error


def _folders(out: Path, outcomes: Iterable[str]) -> list[RunFolder]:
    from fedloom.runs.folder import RunFolder

    return [RunFolder.open(out / name) for name in outcomes if (out / name / "run.toml").is_file()]


def _show(outcomes: dict[str, Outcome], runs: Sequence[RunFolder], written: Sequence[str], as_json: bool) -> None:
    if as_json:
        privacy = {run.path.name: {"privacy": privacy_of(run)} for run in runs}
        found = {name: asdict(outcome) | privacy.get(name, {}) for name, outcome in outcomes.items()}
        show_json({"runs": found, "written": list(written)})
        return
    states = [outcome.state for outcome in outcomes.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "nothing to do"
    say(f"{plural(len(outcomes), 'run')}: {counts}")
    say_guarantee(*runs)
    complain_of(outcomes)
    for path in written:
        say(f"written {path}")
