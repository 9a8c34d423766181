"""Cards of runs whose names are hostile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from fedloom.release.cards import dataset_card, model_card
from fedloom.release.provenance import Provenance
from fedloom.release.standing import Worth

ATTACK = "<script>alert(1)</script> | x\n\n# a title"
TOLD = "&lt;script>alert(1)&lt;/script> \\| x # a title"
HOSTILE = Provenance(
    name=ATTACK,
    config="digest",
    method=ATTACK,
    options={ATTACK: ATTACK},
    source=ATTACK,
    rounds=2,
    silos=1,
    worth=Worth.NONE,
    guarantee=ATTACK,
    epsilon=None,
    delta=None,
    privacy={ATTACK: ATTACK},
    audit=(ATTACK,),
    metrics={f"recall/{ATTACK}/n5/group={ATTACK}": 0.5, "recall/pixels/n5": 0.25},
    objections=(ATTACK,),
)
DATA = {
    "format": "folder",
    "records": 5,
    "shape": [2],
    "labels": None,
    "pathway": {"name": "z1", "summary": ATTACK},
    "seed": 3,
    "counts": {ATTACK: {ATTACK: 5}},
    "licence": ATTACK,
}
WAYS = {ATTACK: {"summary": ATTACK, "inputs": {ATTACK: [2]}}}
MODEL = {"modality": "", "groups": [ATTACK], "shape": [2], "licence": ATTACK, "pathways": WAYS}


@pytest.mark.parametrize(
    ("card", "times"),
    # Title, objection, run, records, method (3), guarantee, privacy (2), audit, metric (2), its group and licence,
    # beside a data set's pathway, group and class, or a model's groups and pathway (3).
    [(dataset_card(HOSTILE, DATA), 15 + 3), (model_card(HOSTILE, MODEL, "`use`"), 15 + 4)],
    ids=["dataset", "model"],
)
def test_a_hostile_name_is_text_in_a_card(card: str, times: int) -> None:
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header)["license"] == ATTACK
    assert "<script>" not in text
    assert text.count(TOLD) == times
    assert sum(line.startswith("# ") for line in text.splitlines()) == 1


def test_what_nobody_measured_or_attacked_is_said() -> None:
    card = dataset_card(replace(HOSTILE, metrics={}, audit=(), objections=()), DATA)
    assert "## Audit\n\nNot audited.\n\n## Quality\n\nNot measured.\n\n## Limits\n" in card
    assert "--accept-risk" not in card
