"""``fedloom ledger``: what has been spent on each silo's data, and what is left."""

from __future__ import annotations

import math
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.output import Json, plural, say, show, show_json, table
from fedloom.errors import ConfigError


def ledger(
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="A run folder, or a ledger file.", show_default=False)
    ] = None,
    registry: Annotated[bool, typer.Option("--registry", help="List the ledgers of this machine's silos.")] = False,
    forget: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Strike a ledger out of the registry, with what it counted."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Answer the question of --forget.")] = False,
    as_json: Json = False,
) -> None:
    """Show the budget of each silo: granted, spent and left, in all and by release."""
    if (path is not None) + registry + (forget is not None) != 1:
        raise ConfigError("give either a run folder or a ledger, or --registry, or --forget with a ledger's path")
    if path is not None:
        _show_accounts(path, as_json)
    elif forget is not None:
        _forget(forget, yes)
    else:
        _show_registry(as_json)


def _show_registry(as_json: bool) -> None:
    from fedloom.privacy.registry import FILE, LedgerRegistry, registry_folder

    folder = registry_folder()
    entries = []
    if (folder / FILE).is_file():
        with closing(LedgerRegistry(folder)) as registry:
            entries = registry.entries()
    if as_json:
        rows = [{"silo": entry.silo, "charges": entry.charges, "ledger": str(entry.path)} for entry in entries]
        show_json({"registry": str(folder), "ledgers": rows})
        return
    if not entries:
        say(f"no ledger is registered in {folder}")
        return
    found = table("silo", "charges", "ledger", right=("charges",))
    for entry in entries:
        found.add_row(entry.silo, str(entry.charges), str(entry.path))
    show(found)


def _forget(path: Path, yes: bool) -> None:
    from fedloom.privacy.registry import LedgerRegistry

    with closing(LedgerRegistry()) as registry:
        charges = max(entry.charges for entry in registry.at(path))
        say(
            f"The registry then no longer knows that {path} counted {plural(charges, 'charge')}: a new, older or "
            "second ledger of the same records may begin their budget anew. That is right only if nothing was released "
            "for them, or if these charges are given up on purpose."
        )
        if not yes:
            if not answers():
                raise ConfigError("--forget asks first, and nobody is there to answer; add --yes")
            typer.confirm("Forget it?", abort=True)
        registry.forget(path)


def answers() -> bool:
    """Whether somebody sits at the terminal who can answer a question."""
    return sys.stdin.isatty()


def _show_accounts(path: Path, as_json: bool) -> None:
    from fedloom.privacy.ledger import format_epsilon, read_accounts
    from fedloom.runs.folder import RunFolder

    file = RunFolder.open(path).ledger if path.is_dir() else path
    accounts = read_accounts(file)
    if as_json:
        show_json({"ledger": str(file), "silos": [account.to_mapping() for account in accounts]})
        return
    numbers = ("charges", "spent", "left", "epsilon", "delta")
    found = table("silo", "release", *numbers, "accountant", right=numbers)
    for account in accounts:
        budget = account.budget
        left = f"{math.floor(1000 * account.left) / 1000:.10g}" if math.isfinite(account.left) else "inf"
        granted = (left, f"{budget.epsilon:g}", f"{budget.delta:g}", budget.accountant)
        charges = sum(release.charges for release in account.releases)
        found.add_row(account.silo, "all", str(charges), format_epsilon(account.spent), *granted)
        found.add_row("", "replaced", "", format_epsilon(account.replaced), "", "", "", "")
        if len(account.releases) > 1:
            for release in account.releases:
                found.add_row("", release.name, str(release.charges), format_epsilon(release.spent), "", "", "", "")
    show(found)
    show("replaced: for one record (or subject) replaced by another, at most this epsilon")
