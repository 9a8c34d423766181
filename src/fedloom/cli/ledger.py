"""``fedloom ledger``: what has been spent on each silo's data, and what is left."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.output import Json, show, show_json, table


def ledger(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run folder, or a ledger file.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show the privacy budget of each silo: granted, spent and left, in all and by release."""
    from fedloom.privacy.ledger import read_accounts, told
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
        found.add_row(account.silo, "all", str(charges), told(account.spent), *granted)
        found.add_row("", "replaced", "", told(account.replaced), "", "", "", "")
        if len(account.releases) > 1:
            for release in account.releases:
                found.add_row("", release.name, str(release.charges), told(release.spent), "", "", "", "")
    show(found)
    show("replaced: for one record (or subject) replaced by another, at most this epsilon")
