"""The commands: parse, call, print. Torch is imported inside a command, and only by those that need it."""

from __future__ import annotations

from typing import Annotated

import typer

import fedloom
from fedloom.cli import (
    auditing,
    catalogue,
    comparison,
    data,
    downstream,
    embedding,
    evaluation,
    federation,
    inspection,
    ledger,
    release,
    reporting,
    sampling,
    sweeping,
    training,
)
from fedloom.cli.output import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated generative modelling: silos learn generators together; their data stay at home.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedloom {fedloom.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before any command."""


app.command("run")(training.run)
app.command("resume")(training.resume)
app.command("sample")(sampling.sample)
app.command("inspect")(inspection.inspect)
app.command("ledger")(ledger.ledger)
app.command("evaluate")(evaluation.evaluate)
app.command("downstream")(downstream.downstream)
app.command("audit")(auditing.audit)
app.command("compare")(comparison.compare)
app.command("sweep")(sweeping.sweep)
app.command("report")(reporting.report)
app.command("synthesize")(release.synthesize)
app.command("export")(release.export)
app.command("embed")(embedding.embed)
app.command("list")(catalogue.list_names)
app.add_typer(data.app, name="data")
app.add_typer(federation.app, name="federation")


def main() -> None:
    """The entry point of the ``fedloom`` command."""
    app(prog_name="fedloom")
