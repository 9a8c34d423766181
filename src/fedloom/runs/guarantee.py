"""Which privacy guarantee holds for a run, as its folder shows it."""

from __future__ import annotations

from dataclasses import replace

from fedloom.privacy.summary import NONE, PrivacySummary, summarise, summary_of
from fedloom.runs.checkpoint import newest_facts
from fedloom.runs.folder import RunFolder
from fedloom.runs.ledgers import ledger_complaint
from fedloom.runs.signed import SignedRun


def guarantee_of(folder: RunFolder) -> PrivacySummary:
    """What may be said to anybody; a run that was private and cannot show it has no guarantee."""
    summary = summarise(folder.config.privacy, folder.ledger)
    if folder.config.privacy.mechanism == "none" or _is_to_begin(folder):
        return summary
    if folder.is_deployed:
        return _of_statements(folder, summary)
    if not folder.ledger.is_file():
        return _without(summary, "the run has no ledger (it was removed)")
    if complaint := ledger_complaint(folder, newest_facts(folder.path), read_only=True):
        return _without(summary, complaint)
    if summary.epsilon is not None and not folder.kept_noise_secret:
        return _without(summary, "an older version drew the run's noise from its seed")
    return summary


def _is_to_begin(folder: RunFolder) -> bool:
    return not folder.ledger.is_file() and not folder.rounds_done and folder.status["state"] == "unfinished"


def _of_statements(folder: RunFolder, planned: PrivacySummary) -> PrivacySummary:
    """In a deployment nobody but the silos knows what was spent."""
    if not folder.statements.is_file():
        where = "the ledgers of a deployment lie at its silos, and none has sent a signed statement"
        return _without(planned, f"the run has no ledger ({where})")
    run = SignedRun.read(folder)
    if run.problems:
        return _without(planned, "; ".join(run.problems))
    summary = summary_of(folder.config.privacy, run.accounts)
    return replace(summary, guarantee=f"{summary.guarantee}; every silo that took part has signed for it")


def _without(summary: PrivacySummary, why: str) -> PrivacySummary:
    return replace(summary, guarantee=f"{NONE} can be shown: {why}", accounts=())
