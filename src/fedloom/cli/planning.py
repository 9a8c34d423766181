"""``fedloom plan``, which is ``fedloom run --dry-run`` too: what a run would take, here and on several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.output import (
    Json,
    Overrides,
    clock,
    completed_preset,
    plural,
    say,
    say_facts,
    show,
    show_json,
    size,
    table,
    terminal,
)
from fedloom.config import Config, load_config
from fedloom.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.experiment import RunEstimate
    from fedloom.experiment.hindsight import Measured


def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PRESET-or-FILE.toml-or-DIR",
            help="What would be run, or the folder of a run, which is set beside its plan.",
            show_default=False,
            autocompletion=completed_preset,
        ),
    ],
    overrides: Overrides = None,
    gpus: Annotated[
        list[int] | None, typer.Option(min=1, help="Project onto so many GPUs; may be repeated.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what time, memory and bytes a run takes, by trying some steps; write nothing."""
    folder = Path(source) if (Path(source) / "run.toml").is_file() else None
    if folder is not None and overrides:
        raise ConfigError(f"{folder} is a run, whose settings stand; {overrides[0]} is for a preset or a file")
    config = load_config(source if folder is None else folder / "run.toml", overrides or ())
    config.privacy.check_mechanism()
    show_plan(config, as_json, gpus or (), folder)


def show_plan(config: Config, as_json: bool, gpus: Sequence[int] = (), folder: Path | None = None) -> None:
    """Print what a run takes, without beginning it; of a ``folder`` what it took, too."""
    with terminal().status("trying some steps"):
        from fedloom.experiment import estimate
        from fedloom.experiment.hindsight import measured
        from fedloom.experiment.projection import assumptions, project

        happened = measured(folder) if folder is not None else None
        found = estimate(config)
        projections = [project(found, count) for count in gpus]
    if as_json:
        projected = {"gpus": [asdict(each) for each in projections], "assumed": assumptions(found)} if gpus else {}
        beside = {"measured": asdict(happened)} if happened is not None else {}
        show_json({**asdict(found), "seconds": found.seconds, **projected, **beside})
        return
    say(f"{config.method.name} would take about {clock(found.seconds)}, and nothing was written")
    _show_estimate(found)
    if happened is not None:
        _show_beside(found, happened)
    if projections:
        rows = table("GPUs", "a round", "in all", "memory of each", "between them", right=("GPUs", "a round", "in all"))
        for each in projections:
            whole = clock(found.rounds * each.seconds_per_round)
            sent = f"{size(each.bytes_between)} a round"
            rows.add_row(str(each.gpus), _seconds(each.seconds_per_round), whole, size(each.memory), sent)
        say("")
        show(rows)
        for sentence in assumptions(found):
            say(f"assumed: {sentence}")


def _show_estimate(found: RunEstimate) -> None:
    traffic = f"{size(found.bytes_up)} up, {size(found.bytes_down)} down, of all silos in all rounds"
    say_facts(
        {
            "data": f"{plural(found.silos, 'silo')}, {plural(found.records, 'record')}",
            "rounds": f"{found.rounds:,}, {_seconds(found.seconds_per_round)} each; "
            f"{plural(found.steps_per_round, 'step')} a round",
            "model": f"{plural(found.parameters, 'parameter')}; {size(found.bytes_per_checkpoint)} a checkpoint",
            "memory": f"{size(found.memory)} at most while it was tried" if found.memory else "not known",
            "bytes": traffic,
            "engine": found.engine,
            "found by": f"{plural(found.tried_steps, 'step')} in three rounds; metrics and samples come on top",
        }
    )


def _show_beside(found: RunEstimate, happened: Measured) -> None:
    """The plan beside what the run took, a round at a time: it may not have ended."""
    rows = table("", "planned here", "measured", right=("planned here", "measured"))
    up = size(found.bytes_up / found.rounds), size(happened.bytes_up_per_round)
    rows.add_row("seconds a round", f"{found.seconds_per_round:.3g}", f"{happened.seconds_per_round:.3g}")
    rows.add_row("steps a round", f"{found.steps_per_round:,}", f"{happened.steps_per_round:,.0f}")
    rows.add_row("bytes up a round", *up)
    rows.add_row("a checkpoint", size(found.bytes_per_checkpoint), size(happened.bytes_per_checkpoint))
    rows.add_row("most memory", size(found.memory), size(happened.memory) if happened.memory else "not kept")
    say("")
    show(rows)
    say(f"measured over {plural(happened.rounds, 'round')}, metrics among them, by {happened.engine}")


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 60 else clock(seconds)
