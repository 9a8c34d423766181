"""``fedloom evaluate``: measure a run that is already there."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from fedloom.cli.metrics import metrics_table
from fedloom.cli.output import Json, Round, RunDir, privacy_of, say, say_guarantee, show, show_json, terminal


def evaluate(
    folder: RunDir,
    metrics: Annotated[
        str, typer.Option(help="Names with commas between them.", show_default="the run's own evaluation.metrics")
    ] = "",
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of each group.", show_default="the run's own evaluation.samples"),
    ] = None,
    backbone: Annotated[
        str, typer.Option(help="The features to compare by.", show_default="the run's own evaluation.backbone")
    ] = "",
    round_number: Round = None,
    device: Annotated[str, typer.Option(help="Where features and likelihoods are computed: cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure a run from its checkpoint and data, and add the result to its evaluations.jsonl."""
    with terminal().status("loading") as status:
        from fedloom.experiment import load

        run = load(folder)
        settings = run.config.evaluation
        if metrics:
            settings = replace(settings, metrics=tuple(name.strip() for name in metrics.split(",")))
        settings = replace(settings, samples=samples or settings.samples, backbone=backbone or settings.backbone)
        status.update("measuring")
        found = run.evaluate(
            settings=settings,
            round_number=round_number,
            device=device,
            progress=lambda name, seconds: status.update(f"measured {name} in {seconds:.1f} s"),
        )
    number = run.folder.rounds_done if round_number is None else round_number
    if as_json:
        privacy = privacy_of(run.folder)
        show_json({"folder": str(folder), "round": number, "privacy": privacy, "metrics": found})
    else:
        say(f"{folder}, round {number}")
        say_guarantee(run.folder)
        show(metrics_table(found))
