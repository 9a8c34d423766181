"""``fedloom downstream``: what a run is good for at its silos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fedloom.cli.output import Json, Round, RunDir, say, show, show_json, table, terminal
from fedloom.downstream import SYNTHETIC_RECORDS

SHOWN = {"accuracy": "ACC", "balanced_accuracy": "BACC", "macro_f1": "F1", "worst_group": "WORST"}


def downstream(
    folder: RunDir,
    choice: Annotated[
        str,
        typer.Option(
            "--lambda",
            help="Whose weight of the mixture, and by what: silo (accuracy), balanced (of each silo, by balanced "
            "accuracy), shared (by all) or class (of each silo).",
        ),
    ] = "silo",
    synthetic: Annotated[
        int, typer.Option(help="Synthetic records that the common head learns from.")
    ] = SYNTHETIC_RECORDS,
    pathway: Annotated[str, typer.Option(help="A way to generate; the method's first unless told.")] = "",
    attribute: Annotated[
        str, typer.Option(help="What tells groups of a class apart, for the worst group; data.condition unless told.")
    ] = "",
    round_number: Round = None,
    as_json: Json = False,
) -> None:
    """Train heads on real and synthetic records, mix them at each silo, and score them on held-out records."""
    with terminal().status("loading") as status:
        from fedloom.downstream.stage import downstream as find
        from fedloom.experiment import load

        found = find(
            load(folder),
            choice=choice,
            synthetic=synthetic,
            pathway=pathway,
            attribute=attribute,
            round_number=round_number,
            progress=status.update,
        )
    if as_json:
        show_json(found | {"privacy": {key: found[key] for key in ("guarantee", "epsilon", "delta")}})
    else:
        say(f"{folder}, round {found['round']}, {found['method']}")
        say(f"privacy: {found['guarantee']}\n")
        print_scores(found)


def print_scores(found: Mapping[str, Any]) -> None:
    """The table, and what it means."""
    columns = tuple(f"{title}\n{test}" for test in ("global", "silo") for title in SHOWN.values())
    shown = table("head", *columns, right=columns)
    rows = {**found["rows"], **({"mixture minus silo-only": found["gain"]} if found["gain"] else {})}
    for row, tests in rows.items():
        values = (tests[test][name] for test in ("global", "silo") for name in SHOWN)
        shown.add_row(row, *(f"{100 * value:.1f}" for value in values))
    show(shown)
    for test, meaning in found["tests"].items():
        say(f"{test}: {meaning}; mean over silos, in percent")
    attribute = found.get("attribute")  # not there in files of older runs
    groups = f"classes under each {attribute}" if attribute else "classes"
    say(f"WORST: the share of right answers in the worst of the groups; groups are {groups}")
    lambdas = ", ".join(
        f"{silo['name']} {_told(silo['lambda']['mixture'])}" for silo in found["silos"] if silo["lambda"]
    )
    if lambdas:
        show(f"lambda: {lambdas}")
    retrieval = found["retrieval"]
    kinds = ", ".join(f"{value:.1%} {kind}" for kind, value in retrieval.items() if kind != "nearest")
    show(f"of the {retrieval['nearest']} records nearest to a held-out one, of the same class: {kinds}")
    for sentence in found["sentences"]:
        show(sentence)


def _told(weights: float | list[float]) -> str:
    return f"{weights:.1f}" if isinstance(weights, float) else "/".join(f"{weight:.1f}" for weight in weights)
