"""Membership inference against generators of tables: exact scores, and what copying and privacy do to them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.audit import audit_run
from fedloom.config import load_config
from fedloom.evaluation.auditing import Effort
from fedloom.experiment import train
from fedloom.federation.records import Federation, Records, Silo
from fedloom.modalities.levels import Coding
from fedloom.modalities.table import modality_name
from fedloom.models.product_mixture import ProductMixture
from fedloom.reports.verdict import verdict_of
from patient_rows import SCHEMA, rows

NO_VALUE = float("nan")


def federation(count: int) -> Federation:
    """One silo with few rows, and many others held out."""

    def records(table: np.ndarray) -> Records:
        nobody = torch.zeros(len(table), dtype=torch.int64)
        return Records(torch.from_numpy(table), nobody - 1, nobody, kind=modality_name(SCHEMA))

    return Federation("patients", (Silo("a", records(rows(count))),), records(rows(600, seed=1)), ("all",))


def test_the_chances_of_a_mixture_are_those_of_its_products() -> None:
    model, draw = ProductMixture((2, 3), components=2), torch.Generator().manual_seed(0)
    model.decoder.shares, model.decoder.levels = torch.randn(2, generator=draw), torch.randn(2, 5, generator=draw)
    shares = model.decoder.shares.softmax(0)
    first, second = (part.softmax(1) for part in torch.split(model.decoder.levels, [2, 3], dim=1))
    cells = list(itertools.product(range(2), range(3)))
    levels = torch.tensor([[float(a == i) for i in range(2)] + [float(b == i) for i in range(3)] for a, b in cells])
    expected = torch.stack([(shares * first[:, a] * second[:, b]).sum() for a, b in cells])
    torch.testing.assert_close(torch.exp(-model.negative_log(levels)), expected.double(), rtol=1e-5, atol=1e-7)
    assert float(torch.exp(-model.negative_log(levels)).sum()) == pytest.approx(1)


def test_rows_are_as_far_apart_as_their_columns() -> None:
    """Of (age, weight, ward, stage, ill): one column differs at a time."""
    row = [20, 100, 0, 1, 0]
    others = [[30, 100, 0, 1, 0], [20, 100, 2, 1, 0], [20, 100, NO_VALUE, 1, 0], [20, NO_VALUE, 0, 1, 0]]
    found = Coding(SCHEMA).coordinates(torch.tensor([row, *others], dtype=torch.float64))
    far = torch.linalg.vector_norm(found[1:] - found[0], dim=1)
    assert far.tolist() == pytest.approx([0.1, 1, 1, math.sqrt(3) / 2])


@pytest.mark.parametrize(
    ("count", "overrides", "least", "most", "word"),
    [
        (15, ("privacy={}",), 0.75, 1.0, "Not usable"),
        (150, ("privacy.epsilon=0.5", "privacy.delta=1e-3", "privacy.trust=local"), 0.4, 0.6, ""),
    ],
    ids=["exact counts of few rows", "private"],
)
def test_few_rows_are_told_from_others_unless_noise_hides_them(
    count: int,
    overrides: tuple[str, ...],
    least: float,
    most: float,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fit that does not stop where chance alone is left learns its rows by heart, if it can see them."""
    monkeypatch.setattr("fedloom.models.product_mixture.ENOUGH", 0.0)
    config = load_config("tables/demo", ["method.steps=600", "evaluation.metrics=[]", *overrides])
    run = train(config, tmp_path / "run", found := federation(count))
    audit = audit_run(run, federation=found, effort=Effort(records=600, samples=500))
    rows_of = audit["attacks"]["membership"]
    assert [row["attack"] for row in rows_of] == ["loss", "nearest sample", "density of samples"]
    area = max(row["area"] for row in rows_of)
    assert least <= area <= most
    said = verdict_of(run.folder).sentence
    assert f"attacks tell training records from others in {area:.0%} of pairs (50% by guessing)" in said
    assert said.startswith(word)


@pytest.mark.parametrize("damage", ["[]", '{"attacks": 1}', '{"attacks": {"membership": [{"area": "x"}, 3]}}'])
def test_a_damaged_audit_says_nothing_of_attacks(damage: str, tmp_path: Path) -> None:
    run = train(load_config("tables/demo", ["method.steps=5", "evaluation.metrics=[]"]), tmp_path / "run")
    (run.folder.path / "audit.json").write_text(damage, encoding="utf-8")
    assert json.loads(damage) is not None
    assert "attacks tell" not in verdict_of(run.folder).sentence
