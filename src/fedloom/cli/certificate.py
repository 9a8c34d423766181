"""``fedloom certificate``: what is promised to whom, on one page, and whether signatures hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from typer.core import TyperGroup

from fedloom.cli.output import Json, complain, more, say, show, show_json, table, terminal
from fedloom.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.certificate.checking import Checked, Known

MAKE = "make"


class MakeUnlessTold(TyperGroup):
    """``fedloom certificate DIR`` stands for ``fedloom certificate make DIR``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the command in where none is named."""
        named = not args or args[0] in {*self.commands, *ctx.help_option_names}
        return super().parse_args(ctx, args if named else [MAKE, *args])


app = typer.Typer(
    cls=MakeUnlessTold,
    no_args_is_help=True,
    suggest_commands=False,
    help="State on one page what a run promises to whom: 'fedloom certificate DIR'; and verify what silos signed.",
)


@app.command(MAKE, epilog=more("how-to/certificate.md"))
def make(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run's folder.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="The folder to write into.", show_default="DIR/certificate")] = None,
    approval: Annotated[
        list[str] | None,
        typer.Option(help='Who approves, as "name, role, date"; may be repeated.', show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's certificate as HTML, PDF and JSON."""
    with terminal().status("reading"):
        from fedloom.certificate.making import make_certificate
        from fedloom.certificate.matter import Approval
        from fedloom.runs.folder import RunFolder

        place = out or folder / "certificate"
        made = make_certificate(RunFolder.open(folder), place, [Approval.of(text) for text in approval or ()])
    if as_json:
        show_json({"out": str(place), **made.to_mapping()})
    else:
        say(f"{place}: certificate.html, certificate.pdf, certificate.json")
        say(made.verdict)


@app.command("verify", epilog=more("how-to/certificate.md"))
def verify(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A statements.json or certificate.json.", show_default=False)
    ],
    key: Annotated[
        list[str] | None,
        typer.Option(help="SILO=FINGERPRINT, as the silo itself tells it; may be repeated.", show_default=False),
    ] = None,
    federation: Annotated[
        Path | None, typer.Option(help="The federation's folder, for its charter and keys.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Check signatures, charter and epsilon, on any machine; exit code 1 where something is wrong, 2 if unreadable."""
    with terminal().status("verifying"):
        from fedloom.certificate.checking import check_file

        found = check_file(file, _known(key or (), federation))
    if as_json:
        show_json(found.to_mapping())
    elif found.signed:
        _show(found)
    for sentence in found.findings:
        complain("Wrong", sentence, typer.colors.RED)
    if found.findings:
        raise typer.Exit(1)
    if found.unknown and not as_json:
        whose = ", ".join(found.unknown)
        complain("Note", f"whose keys these are is not shown here: ask {whose}, and give --key", typer.colors.YELLOW)


def _known(keys: Iterable[str], federation: Path | None) -> Known:
    """What the reader knows: keys given one by one go before those that a federation's server has admitted."""
    from fedloom.certificate.checking import Known

    given = dict(map(_pair, keys))
    if federation is None:
        return Known(given)
    from fedloom.deployment.directories import ServerDirectory
    from fedloom.privacy.signatures import fingerprint

    home = ServerDirectory.open(federation)
    admitted = {silo: fingerprint(line) for silo, line in home.keys_admitted().items()}
    return Known(admitted | given, home.charter.to_mapping())


def _pair(text: str) -> tuple[str, str]:
    silo, equals, digits = text.partition("=")
    if not (silo and equals and digits):
        raise ConfigError(f"--key = '{text}' must be SILO=FINGERPRINT")
    return silo, digits


def _show(found: Checked) -> None:
    from fedloom.privacy.ledger import format_epsilon

    rows = table("silo", "key", "for each", "epsilon", "delta", right=("epsilon", "delta"))
    for each in found.signed:
        rows.add_row(each.silo, each.fingerprint, each.unit, format_epsilon(each.epsilon), f"{each.delta:g}")
    show(rows)
