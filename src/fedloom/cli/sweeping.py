"""``fedloom sweep``: a grid of runs, and their comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.clusters import Jobs, On, Sbatch, Where, cluster_of
from fedloom.cli.comparison import compared, show_comparison
from fedloom.cli.output import Json, complain, plural, privacy_of, say, say_guarantee, show_json, terminal

if TYPE_CHECKING:
    from fedloom.cli.progress import RoundProgress
    from fedloom.cluster import Cluster
    from fedloom.runs.folder import RunFolder
    from fedloom.sweep import Outcome, Pack, Trial

INTERRUPTED = 130


def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.toml", help="A base, a grid, variants.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The folder of all runs; one that exists is gone on with.")],
    pack: Annotated[
        str, typer.Option(help="Runs of equal shape in one program of the fused engine: auto, off or a number.")
    ] = "auto",
    on: On = None,
    jobs: Jobs = 0,
    sbatch: Sbatch = None,
    as_json: Json = False,
) -> None:
    """Run every combination of a grid, each into a folder of its own, and compare them; goes on where it stopped."""
    cluster = cluster_of(on, out, jobs, sbatch or ())
    with terminal().status("loading"):
        from fedloom.runs.folder import RunFolder
        from fedloom.sweep import pack_of, read_sweep

        trials, together = read_sweep(file), pack_of(pack)
    try:
        outcomes = _outcomes(cluster, trials, out, together)
    except KeyboardInterrupt as error:
        jobs_go_on = "jobs that were submitted go on; " if on is Where.SLURM else ""
        again = f"fedloom sweep {file} --out {out}" + (f" --on {on.value}" if on else "")
        typer.echo(f"stopped; {jobs_go_on}`{again}` goes on", err=True)
        raise typer.Exit(INTERRUPTED) from error
    runs = [RunFolder.open(out / trial.name) for trial in trials if (out / trial.name / "run.toml").is_file()]
    measured = [run for run in runs if run.latest_metrics()]
    report = _report(measured, out) if measured else None
    if as_json:
        privacy = {run.path.name: {"privacy": privacy_of(run)} for run in runs}
        found = {name: asdict(outcome) | privacy.get(name, {}) for name, outcome in outcomes.items()}
        comparison = compared(measured) if measured else {}
        show_json({"out": str(out), "trials": found, "comparison": comparison, "report": report})
    else:
        _show(outcomes, runs, measured, report, out)
    if any(outcome.state == "failed" for outcome in outcomes.values()):
        raise typer.Exit(1)


def _outcomes(cluster: Cluster | None, trials: list[Trial], out: Path, pack: Pack) -> dict[str, Outcome]:
    """How trials ended, by jobs or in this process."""
    console = terminal()
    with console.status("loading"):
        from fedloom.cli.progress import RoundProgress
        from fedloom.sweep import run_sweep, sweep_on

    @contextmanager
    def observe(packed: Sequence[Trial]) -> Iterator[RoundProgress]:
        numbers = ", ".join(str(1 + trials.index(trial)) for trial in packed)
        names = ", ".join(trial.name for trial in packed)
        console.print(f"[{numbers}/{len(trials)}] {names}", markup=False, style="bold", soft_wrap=True)
        with RoundProgress(console, runs=len(packed)) as progress:
            yield progress

    if cluster is None:
        return run_sweep(trials, out, observe, pack)
    return sweep_on(cluster, trials, out, pack, partial(typer.echo, err=True))


def _show(
    outcomes: dict[str, Outcome], runs: list[RunFolder], measured: list[RunFolder], report: str | None, out: Path
) -> None:
    states = [outcome.state for outcome in outcomes.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    say(f"{plural(len(outcomes), 'run')} in {out}: {counts}")
    say_guarantee(*runs)
    if measured:
        say("")
        show_comparison(measured)
    complain_of(outcomes)
    if report:
        say(f"report  {report}")


def complain_of(outcomes: Mapping[str, Outcome]) -> None:
    """Name the trials that failed, and those that diverged: these are results, and the command still succeeds."""
    for name, outcome in outcomes.items():
        if outcome.state == "failed":
            complain("Failed", f"{name}: {outcome.reason}", typer.colors.RED)
        elif outcome.state == "diverged":
            complain("Diverged", f"{name}: {outcome.reason}", typer.colors.YELLOW)


def _report(runs: list[RunFolder], out: Path) -> str:
    """One page about all runs."""
    from fedloom.experiment import Run
    from fedloom.reports.report import write_report

    page = out / "report.html"
    with terminal().status("writing the report"):
        write_report([Run(run) for run in runs], page)
    return str(page)
