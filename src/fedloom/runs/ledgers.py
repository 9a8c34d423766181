"""Whether the ledger in a run's folder is the one that the run was begun with, and has all that it counted.

A simulation's ledger is registered nowhere. So the run's own files remember it: environment.json from before its first
charge on, and every checkpoint how far it had come. It may be ahead of them, because a silo pays before it trains;
where it lags behind, it was replaced, and a claim made from it would be too small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.privacy.accounts import Chain
from fedloom.privacy.ledger import Ledger
from fedloom.runs.folder import RunFolder

LEDGER = "ledger"  # in environment.json which it is, in a checkpoint how far it had come


def ledger_facts(chain: Chain) -> dict[str, Any]:
    """What a checkpoint remembers of the ledger."""
    return {LEDGER: {"identity": chain.ledger, "charges": chain.charges, "head": chain.heads[-1]}}


def ledger_complaint(folder: RunFolder, facts: Mapping[str, Any], *, read_only: bool) -> str:
    """Why a run's ledger does not tell all that was spent; empty where it does.

    ``facts`` are those of the newest checkpoint, if there is one. Older versions remembered nothing there; what left is
    logged in their folders too.
    """
    begun, kept = folder.environment.get(LEDGER, ""), facts.get(LEDGER)
    released = {(row["round"], row["silo"]) for row in folder.egress() if _of_records(row)}
    if not folder.ledger.is_file():
        gone = f"{folder.ledger.name} is gone, and a new one would begin the budgets of all silos anew; put it back"
        return gone if begun or kept or released else ""
    ledger = Ledger(folder.ledger, read_only=read_only)
    try:
        chain, paid = ledger.chain(), ledger.paid()
    finally:
        ledger.close()
    if chain.ledger != (begun or chain.ledger):
        return f"{folder.ledger.name} is not the ledger that the run was begun with; put that one back"
    if kept and not chain.goes_on_from(kept["charges"], kept["head"]):
        return (
            f"{folder.ledger.name}, with {chain.charges} charges, is older than the one that the newest checkpoint "
            f"was made with, which had {kept['charges']}; put the newest one back"
        )
    for round, silo in sorted(released - paid):
        return (
            f"{folder.ledger.name} has no charge for round {round} of silo '{silo}', in which something left it "
            "(egress.jsonl); put the newest one back"
        )
    return ""


def _of_records(row: Mapping[str, Any]) -> bool:
    """Whether more left than the public number of records."""
    return bool(row["blocks"] or set(row["payloads"]) - {"records"})
