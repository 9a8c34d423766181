"""A ledger on one screen: what each silo has spent, and of how much."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.privacy.accounts import Account
from fedloom.privacy.ledger import format_epsilon
from fedloom.shown import Shown


def shown_accounts(accounts: Sequence[Account]) -> Shown:
    """A row for each silo; what was spent is rounded up."""
    rows = [
        (
            account.silo,
            account.budget.unit,
            format_epsilon(account.spent),
            format_epsilon(account.budget.epsilon),
            f"{account.budget.delta:g}",
        )
        for account in accounts
    ]
    return Shown("ledger", (), ("silo", "for each", "epsilon spent", "of", "delta"), rows)
