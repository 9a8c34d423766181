"""Which privacy guarantee holds for a run, as its folder shows it."""

from __future__ import annotations

from dataclasses import replace

from fedloom.privacy.summary import NONE, PrivacySummary, summarise
from fedloom.runs.folder import RunFolder


def guarantee_of(folder: RunFolder) -> PrivacySummary:
    """What may be said to anybody; a run that was private and cannot show it has no guarantee."""
    summary = summarise(folder.config.privacy, folder.ledger)
    if folder.config.privacy.mechanism == "none":
        return summary
    deployed = folder.environment.get("engine_choice", {}).get("name") == "flower"
    if not folder.ledger.is_file() and (folder.rounds_done or folder.status["state"] != "unfinished"):
        where = "the ledgers of a deployment lie at its silos" if deployed else "it was removed"
        return replace(summary, guarantee=f"{NONE} can be shown: the run has no ledger ({where})")
    if summary.epsilon is not None and not deployed and not folder.kept_noise_secret:
        problem = f"{NONE} can be shown: an older version drew the run's noise from its seed"
        return replace(summary, guarantee=problem, accounts=())
    return summary
