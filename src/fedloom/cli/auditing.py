"""``fedloom audit``: attack a run, and set what is found beside what it claims."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.output import Json, Round, RunDir, privacy_of, say, show, show_json, table, terminal


def audit(
    folder: RunDir,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="canaries, membership or outliers; may be repeated.", show_default="all that apply"),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of the bound on epsilon and of all intervals.")] = 0.95,
    records: Annotated[int, typer.Option(min=2, help="At most so many records of each kind are attacked.")] = 500,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each group that records are looked for in.")] = 2000,
    round_number: Round = None,
    device: Annotated[str, typer.Option(help="Where the attacks are computed: cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Attack a run by canaries, membership inference and outliers; a refuted epsilon exits with 1."""
    with terminal().status("loading") as status:
        from fedloom.audit import audit_run
        from fedloom.evaluation.auditing import Effort
        from fedloom.experiment import load

        run = load(folder)
        found = audit_run(
            run,
            attacks=attack or (),
            effort=Effort(records, samples, confidence),
            round_number=round_number,
            device=device,
            progress=lambda name: status.update(f"attacking by {name}"),
        )
    if as_json:
        show_json(found | {"privacy": privacy_of(run.folder)})
    else:
        _print(folder, found)
    if found["refuted"]:
        raise typer.Exit(1)


def _print(folder: Path, found: Mapping[str, Any]) -> None:
    say(f"{folder}, round {found['round']}")
    say(f"privacy: {found['claimed']}\n")
    if rows := found["attacks"].get("membership"):
        numbers = ("members", "others", "area", "found at 0.1% false", "at 1% false")
        shown = table("generator", "membership by", *numbers, right=numbers)
        for row in rows:
            rates = [f"{rate['value']:.1%}" for rate in row["true_positive_rates"].values()]
            counts = (f"{row['members']:,}", f"{row['others']:,}", f"{row['area']:.3f}")
            shown.add_row(row["target"], row["attack"], *counts, *rates)
        show(shown)
        say("")
    if rows := found["attacks"].get("outliers"):
        kinds = ("outliers", "unseen_outliers", "typical", "unseen_typical")
        titles = tuple(kind.replace("_", " ") for kind in kinds)
        shown = table("generator", "recognisably", *titles, right=titles)
        for row in rows:
            shown.add_row(row["target"], row["way"], *(f"{row[kind]['value']:.1%}" for kind in kinds))
        show(shown)
        say("")
    for sentence in found["sentences"]:
        show(sentence)
