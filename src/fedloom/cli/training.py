"""``fedloom run`` and ``fedloom resume``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.background import detach
from fedloom.cli.interruption import stoppable
from fedloom.cli.metrics import last_metrics, last_terms, listed, metrics_table
from fedloom.cli.output import (
    Json,
    Overrides,
    RunDir,
    clock,
    completed_preset,
    plural,
    privacy_of,
    say,
    say_facts,
    say_guarantee,
    show,
    show_json,
    terminal,
)
from fedloom.cli.planning import show_plan
from fedloom.cli.ranks import NumberOfRanks, launch, led
from fedloom.config import Config, load_config
from fedloom.errors import ConfigError
from fedloom.runs.files import file_name
from fedloom.settings import override

if TYPE_CHECKING:
    from fedloom.experiment import Run
    from fedloom.experiment.on_ranks import Leader
    from fedloom.runs.folder import RunFolder

ENGINE = {"name": "engine", "device": "device", "precision": "precision"}  # setting -> option
EngineName = Annotated[
    str | None, typer.Option("--engine", help="auto, reference, fused, or flower.", show_default=False)
]
Federation = Annotated[
    Path | None,
    typer.Option("--federation", metavar="DIR", help="A federation's folder: run across machines.", show_default=False),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.", show_default=False)]
Detached = Annotated[bool, typer.Option("--detach", help="Go on in the background; 'fedloom status' looks after it.")]
Precision = Annotated[str | None, typer.Option(help="float32, tf32 or bf16.", show_default=False)]


def run(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PRESET-or-FILE.toml",
            help="'fedloom list presets' names them.",
            show_default=False,
            autocompletion=completed_preset,
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The new run folder.", show_default="runs/<name>-<method>-s<seed>"),
    ] = None,
    engine: EngineName = None,
    device: Device = None,
    precision: Precision = None,
    federation: Federation = None,
    ranks: NumberOfRanks = None,
    detached: Detached = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try some steps, and say how long the run would take; write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train what a preset or a file describes, into a new run folder."""
    _check_place(engine, federation, bool(detached or dry_run or ranks))
    if dry_run and ranks:
        raise ConfigError("--dry-run tries steps in this process alone; leave --ranks out")
    words = [*(overrides or ()), *(f"engine.{k}={v}" for k, v in _engine(engine, device, precision).items())]
    with led(lambda: load_config(source, words)) as leader:
        config = load_config(source, words)
        config.privacy.check_mechanism()
        if dry_run:
            show_plan(config, as_json)
            return
        folder = out or Path("runs") / file_name(f"{config.name}-{config.method.name}-s{config.seed}")
        command = ["run", source, *words, "--out", str(folder)]
        if detached:
            detach(command + [f"--ranks={ranks}"] * bool(ranks), folder)
            return
        if ranks:
            launch(command + ["--json"] * as_json, ranks)
        finished = _trained(config, folder, federation, leader)
    _summarise(finished, as_json)
    _fail_if_diverged(finished)


def _trained(config: Config, folder: Path, federation: Path | None, leader: Leader | None) -> Run:
    """A new run to its end, here, on several ranks, or across machines."""
    with terminal().status("loading"):
        from fedloom.cli.progress import RoundProgress
        from fedloom.experiment import load, train
    if federation is None:
        with stoppable(folder), RoundProgress(terminal()) as progress:
            return leader.train(config, folder, progress) if leader else train(config, folder, observer=progress)
    from fedloom.deployment.directories import ServerDirectory
    from fedloom.deployment.tail import run_at

    with stoppable(folder):
        run_at(ServerDirectory.open(federation), config, folder, partial(typer.echo, err=True))
    return load(folder)


def resume(
    folder: RunDir,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[rounds=N]", help="Train on until it has so many rounds in all.")
    ] = None,
    engine: EngineName = None,
    device: Device = None,
    precision: Precision = None,
    federation: Federation = None,
    ranks: NumberOfRanks = None,
    detached: Detached = False,
    as_json: Json = False,
) -> None:
    """Go on with a stopped run, exactly as if it had not stopped (on another engine: up to rounding)."""
    _check_place(None, federation, bool(detached or ranks))
    wanted = _engine(engine, device, precision)
    command = ["resume", str(folder), *(overrides or ()), *(f"--{ENGINE[key]}={wanted[key]}" for key in wanted)]
    if detached:
        detach(command + [f"--ranks={ranks}"] * bool(ranks), folder)
        return
    if ranks:
        launch(command + ["--json"] * as_json, ranks)
    with led(lambda: None) as leader:
        with terminal().status("loading"):
            from fedloom import experiment
        run_folder, rounds = experiment.load(folder).folder, _rounds(overrides or [])
        ended = run_folder.status["state"] != "unfinished" and rounds is None
        if federation is None and run_folder.is_deployed and rounds is None:
            raise ConfigError(f"{folder} was made by a federation; say --federation DIR, or call 'flwr run' again")
        if federation is not None:
            found = _resumed_there(run_folder, federation, rounds, ended)
        else:
            found = _resumed_here(folder, wanted, rounds, leader)
    if ended and not as_json:
        say(f"nothing is left to resume in {folder}: the run {_ending(found)}")
        say_guarantee(found.folder)
    else:
        _summarise(found, as_json)
    _fail_if_diverged(found)


def _resumed_here(folder: Path, engine: dict[str, str], rounds: int | None, leader: Leader | None) -> Run:
    """On this machine, or on several ranks."""
    from fedloom import experiment
    from fedloom.cli.progress import RoundProgress

    with stoppable(folder), RoundProgress(terminal()) as progress:
        if leader:
            return leader.resume(folder, progress, engine, rounds)
        return experiment.resume(folder, observer=progress, engine=engine, rounds=rounds)


def _resumed_there(run_folder: RunFolder, federation: Path, rounds: int | None, ended: bool) -> Run:
    """Across machines."""
    from fedloom import experiment
    from fedloom.deployment.directories import ServerDirectory
    from fedloom.deployment.gathering import unsigned
    from fedloom.deployment.tail import resume_at

    folder = run_folder.path
    if rounds is not None:
        raise ConfigError(f"the silos of {folder} agreed to {run_folder.config.rounds} rounds; begin a new run")
    home = ServerDirectory.open(federation)
    with stoppable(folder):
        if not ended or unsigned(run_folder, tuple(home.charter.silos)):
            resume_at(home, run_folder, partial(typer.echo, err=True))
    return experiment.load(folder)


def _rounds(overrides: list[str]) -> int | None:
    """The one setting of a run that may grow later."""
    tree = override({}, overrides)
    found = tree.pop("rounds", None)
    if tree or (found is not None and (isinstance(found, bool) or not isinstance(found, int))):
        raise ConfigError(f"'fedloom resume' takes rounds=N and no other setting, and was given {' '.join(overrides)}")
    return found


def _check_place(engine: str | None, federation: Path | None, alone: bool) -> None:
    """``--engine flower`` and ``--federation DIR`` go together, and apart from what is for this machine ``alone``."""
    if federation is not None and alone:
        raise ConfigError("--detach, --dry-run and --ranks are for runs on this machine, and --federation DIR is given")
    if engine == "flower" and federation is None:
        raise ConfigError("--engine flower needs --federation DIR, the folder that 'fedloom federation init' made")
    if federation is not None and engine not in (None, "flower"):
        raise ConfigError(f"--federation runs on the engine 'flower', but --engine {engine} is asked for")


def _engine(name: str | None, device: str | None, precision: str | None) -> dict[str, str]:
    """What was said about the engine."""
    settings = {"name": None if name == "flower" else name, "device": device, "precision": precision}
    return {key: value for key, value in settings.items() if value is not None}


def _ending(run: Run) -> str:
    status = run.folder.status
    if status["state"] == "diverged":
        return f"diverged in round {status['round']}: {status['reason']}"
    return f"is {status['state']}, {run.folder.rounds_done} of {plural(run.config.rounds, 'round')} done"


def _fail_if_diverged(run: Run) -> None:
    """Whatever goes on after this command must not take the run for a good one."""
    if run.folder.status["state"] == "diverged":
        raise typer.Exit(1)


def _summarise(run: Run, as_json: bool) -> None:
    summary = _summary(run)
    if as_json:
        show_json(summary)
        return
    say(f"{summary['method']} {_ending(run)}, in {clock(summary['seconds'])}")
    say_guarantee(run.folder)
    if summary["metrics"]:
        say("")
        show(metrics_table(summary["metrics"]))
        say("")
    folder = summary["folder"]
    rows = {
        "engine": summary["engine"],
        "train": listed(summary["loss"]) or "no losses: they are in no release, and in no sum",
        "grids": summary["samples"] or "none",
        "next": f"fedloom inspect {folder}",
    }
    if run.folder.rounds_done and run.generator().teaches:
        rows["or"] = f"fedloom downstream {folder}"
    elif summary["groups"] and summary["samples"]:  # otherwise nothing that generates reached the server
        ending = next(Path(summary["samples"]).iterdir()).suffix  # of pictures, or of a table
        rows["or"] = f"fedloom sample {folder} --group {summary['groups'][0]} --out grid{ending}"
    say_facts(rows)


def _summary(run: Run) -> dict[str, Any]:
    samples = sorted((run.folder.path / "samples").glob("round-*"))
    return {
        "folder": str(run.folder.path),
        "name": run.config.name,
        "method": run.config.method.name,
        **run.folder.status,
        "privacy": privacy_of(run.folder),
        "seconds": sum(row["seconds"] for row in run.metrics()),
        "engine": run.folder.environment.get("engine", ""),
        "groups": list(run.generator().groups) if run.folder.rounds_done else [],
        "loss": last_terms(run),
        "metrics": last_metrics(run),
        "samples": str(samples[-1]) if samples else None,
    }
