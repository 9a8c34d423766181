"""The audit of a run: attacks on what it released, beside what its ledger claims, kept in its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedloom.errors import ConfigError, unknown
from fedloom.evaluation.auditing import ATTACKS, Audit, Claim, Effort, Pictures
from fedloom.experiment import Run, file_name
from fedloom.federation.records import Federation
from fedloom.modalities.base import Modality, modality_of
from fedloom.privacy.ledger import read_accounts
from fedloom.runs.files import explained
from fedloom.runs.folder import RunFolder
from fedloom.runs.guarantee import guarantee_of
from fedloom.runs.images import save_shown

SCHEMA = 1


def audit_run(
    run: Run,
    *,
    attacks: Sequence[str] = (),
    effort: Effort | None = None,
    round_number: int | None = None,
    device: str = "cpu",
    federation: Federation | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Attack a checkpoint and write what is found to audit.json and audit/; ``progress`` hears of each attack.

    All attacks unless some are named. ``federation`` is needed where the run was given one in memory.
    """
    for name in attacks:
        if name not in ATTACKS:
            raise ConfigError("--attack: " + unknown("attack", name, ATTACKS))
    if "canaries" in attacks and not run.config.audit.canaries:
        raise ConfigError("--attack canaries needs a run with canaries; train one with audit.canaries greater than 0")
    if "outliers" in attacks and not run.config.data.outliers.source:
        raise ConfigError("--attack outliers needs a run with outliers; train one with data.outliers.source")
    folder = run.folder
    _, evaluation = run.evaluation(round_number=round_number, device=device, federation=federation)
    fitting = fitting_attacks(evaluation.real.federation.modality)
    if unfit := [name for name in attacks if name not in fitting]:
        raise ConfigError(
            f"--attack {unfit[0]} does not fit {evaluation.real.federation.modality.plural}; use {', '.join(fitting)}"
        )
    audit = Audit(evaluation, claims_of(folder), effort or Effort())
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "round": folder.rounds_done if round_number is None else round_number,
        "claimed": guarantee_of(folder).guarantee,
        "confidence": audit.effort.confidence,
        "refuted": False,
        "sentences": [],
        "attacks": {},
    }
    for name in attacks or fitting:
        if progress is not None:
            progress(name)
        findings = ATTACKS[name](audit)
        found["attacks"][name] = findings.values
        found["sentences"] += findings.sentences
        _save(folder, findings.pictures, evaluation.generator.kind)
    found["refuted"] = bool((found["attacks"].get("canaries") or {}).get("refuted"))
    folder.record_audit(found)
    return found


def fitting_attacks(modality: Modality) -> tuple[str, ...]:
    """Those that make sense of such records: what was put among them is looked for by what models make of it."""
    if not modality.compares and modality.coordinates is None:
        raise ConfigError(
            f"no attack fits {modality.plural}: all look for records that are near others, and no distance says which "
            "are"
        )
    return tuple(ATTACKS) if modality.compares else ("membership",)


def claims_of(folder: RunFolder) -> dict[str, Claim]:
    """What was spent on each silo's data, of those whose ledger claims an epsilon at all."""
    if not folder.ledger.is_file():
        return {}
    return {
        account.silo: Claim(account.spent, account.budget.delta)
        for account in read_accounts(folder.ledger)
        if account.spent < float("inf")
    }


def _save(folder: RunFolder, pictures: Mapping[str, Pictures], kind: str) -> None:
    """Three rows for each generator: outliers, what it makes of them, and the typical record nearest to that."""
    for name, rows in pictures.items():
        images = torch.cat([rows.outliers, rows.outputs, rows.typical])
        if modality_of(kind, images.shape[1:]).shows(images.shape[1:]):
            path = folder.path / "audit" / f"outliers-{file_name(name)}"
            with explained(path):
                path.parent.mkdir(exist_ok=True)
            save_shown(images, path, columns=len(rows.outliers), kind=kind)
