"""The commands: parse, call, print. Torch is imported inside a command, and only by those that need it."""

from __future__ import annotations

from typing import Annotated

import typer

import fedloom
from fedloom.cli import (
    auditing,
    background,
    beginning,
    catalogue,
    certificate,
    comparison,
    data,
    downstream,
    embedding,
    evaluation,
    federation,
    federation_hosted,
    federation_keys,
    inspection,
    ledger,
    operations,
    planning,
    release,
    reporting,
    reproducing,
    sampling,
    studio,
    sweeping,
    training,
)
from fedloom.cli.output import Commands, more

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    suggest_commands=False,  # click does it too
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


app.command("init", epilog=more("how-to/own-data.md"))(beginning.init)
app.command("run", epilog=more("reference/configuration.md"))(training.run)
app.command("plan", epilog=more("how-to/long-runs.md"))(planning.plan)
app.command("resume", epilog=more("reference/files.md"))(training.resume)
app.command("status", epilog=more("how-to/long-runs.md"))(background.status)
app.command("stop", epilog=more("how-to/long-runs.md"))(background.stop)
app.command("sample", epilog=more("tutorial.md"))(sampling.sample)
app.command("inspect", epilog=more("tutorial.md"))(inspection.inspect)
app.command("ledger", epilog=more("privacy.md"))(ledger.ledger)
app.command("evaluate", epilog=more("evaluation.md"))(evaluation.evaluate)
app.command("downstream", epilog=more("dp-cvae.md"))(downstream.downstream)
app.command("audit", epilog=more("privacy.md"))(auditing.audit)
app.command("compare", epilog=more("evaluation.md"))(comparison.compare)
app.command("sweep", epilog=more("evaluation.md"))(sweeping.sweep)
app.command("reproduce", epilog=more("reproduction.md"))(reproducing.reproduce)
app.command("report", epilog=more("how-to/report.md"))(reporting.report)
app.command("synthesize", epilog=more("release.md"))(release.synthesize)
app.command("export", epilog=more("release.md"))(release.export)
app.command("studio", epilog=more("studio.md"))(studio.studio)
app.command("embed", epilog=more("dp-cvae.md"))(embedding.embed)
app.command("list", epilog=more("reference/catalogue.md"))(catalogue.list_names)
app.add_typer(certificate.app, name="certificate", epilog=more("how-to/certificate.md"))
app.add_typer(data.app, name="data", epilog=more("how-to/own-data.md"))
operations.add_to(federation.app)
app.add_typer(federation.app, name="federation", epilog=more("deployment.md"))


__all__ = ["app", "federation_hosted", "federation_keys", "main"]  # which adds to the commands of ``federation``


def main() -> None:
    """The entry point of the ``fedloom`` command."""
    app(prog_name="fedloom")
