"""What metrics of tables mean: exact numbers on made tables, and what damage does to them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.config import EvaluationConfig, load_config
from fedloom.errors import ConfigError, FedloomWarning
from fedloom.evaluation.closest_record import closest
from fedloom.evaluation.column_shapes import column_shapes
from fedloom.evaluation.pair_trends import pair_trends
from fedloom.evaluation.suite import Evaluator
from fedloom.evaluation.table_marginals import column_sets, marginal_distance, marginal_distances
from fedloom.evaluation.table_utility import learned
from fedloom.experiment import train
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation, Records, Silo
from fedloom.modalities.schema import Numbers, Schema
from fedloom.modalities.table import modality_name
from fedloom.streams import Streams
from patient_rows import SCHEMA, rows
from support import tiny_config

REAL = rows(2000)
FRESH = rows(2000, seed=1)


def shuffled(table: Numbers, *columns: int) -> Numbers:
    """Some columns in another order: each still has its values."""
    found = table.copy()
    for column in columns:
        found[:, column] = np.random.default_rng(column).permutation(found[:, column])
    return found


def constructed() -> tuple[Numbers, Numbers]:
    """Two tables by formulas, with values missing in both."""
    i, j = np.arange(60.0), np.arange(45.0)
    one = (i * 7 % 100, np.where(i % 9 == 0, np.nan, 40 + i * 7 % 100 + i % 5), np.where(i % 11 == 0, np.nan, i % 3))
    two = (j * j % 97, np.where(j % 6 == 0, np.nan, 50 + j * 3 % 90), np.where(j % 7 == 0, np.nan, j * j % 3))
    return np.stack([*one, i * i % 4, i % 5 > 2], axis=1), np.stack([*two, j % 4, j % 4 > 1], axis=1)


def test_shapes_and_trends_are_those_of_sdmetrics() -> None:
    """Figures of sdmetrics 0.32.0 on these tables, by its properties ColumnShapes and ColumnPairTrends."""
    one, two = constructed()
    assert column_shapes(SCHEMA, one, two) == pytest.approx(0.7722983626, abs=1e-7)
    assert pair_trends(SCHEMA, one, two) == pytest.approx(0.5696162153978435, abs=1e-12)


@pytest.mark.parametrize("likeness", [column_shapes, pair_trends])
def test_a_column_that_does_not_vary_or_has_no_value_is_left_out(likeness: object) -> None:
    """Of the same table all that is left is alike; without it a mean would not be a number."""
    table = REAL.copy()
    table[:, 0], table[:, 1] = 50.0, np.nan
    assert callable(likeness)
    assert likeness(SCHEMA, table, table) == 1.0


def test_the_distance_is_that_of_counts() -> None:
    """Two columns of two levels, four rows against two."""
    schema = Schema.of({"columns": {name: {"kind": "ordinal", "levels": ["0", "1"]} for name in "ab"}})
    one = np.array([[0, 0], [0, 0], [0, 1], [1, 1]], dtype=np.float64)
    two = np.array([[0, 1], [1, 1]], dtype=np.float64)
    # a: 3/4, 1/4 and 1/2, 1/2; b: 1/2, 1/2 and 0, 1; both: 1/2, 1/4, 0, 1/4 and 0, 1/2, 0, 1/2
    assert marginal_distance(schema, one, two, 1) == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert marginal_distance(schema, one, two, 2) == pytest.approx(1 / 2)
    assert marginal_distances(schema, one, two, 2) == {(0, 1): pytest.approx(1 / 2)}


@pytest.mark.parametrize("ways", [1, 2, 3])
def test_the_same_rows_in_another_order_are_no_distance_away(ways: int) -> None:
    assert marginal_distance(SCHEMA, REAL[::-1], REAL, ways) == pytest.approx(0, abs=1e-12)


def test_columns_that_are_shuffled_keep_themselves_and_lose_their_pairs() -> None:
    broken = shuffled(REAL, 0, 2, 3)
    assert marginal_distance(SCHEMA, broken, REAL, 1) == pytest.approx(0, abs=1e-12)
    assert marginal_distance(SCHEMA, broken, REAL, 2) > 3 * marginal_distance(SCHEMA, FRESH, REAL, 2)
    assert column_shapes(SCHEMA, REAL, broken) == pytest.approx(1)
    assert pair_trends(SCHEMA, REAL, broken) < pair_trends(SCHEMA, REAL, FRESH) - 0.1


def test_pairs_do_not_show_what_triples_do() -> None:
    """The third column says whether the first two are alike: every pair is as without it."""
    schema = Schema.of({"columns": {name: {"kind": "ordinal", "levels": ["0", "1"]} for name in "abc"}})
    every = np.array([[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)], dtype=np.float64)
    alike = every[(every[:, 0] == every[:, 1]) == every[:, 2]]
    assert marginal_distance(schema, alike, every, 2) == 0
    assert marginal_distance(schema, alike, every, 3) == pytest.approx(1 / 2)


@pytest.mark.parametrize("ways", [1, 2, 3])
def test_a_level_that_is_dropped_shows(ways: int) -> None:
    without = FRESH[FRESH[:, 2] != 1]
    assert marginal_distance(SCHEMA, without, REAL, ways) > 3 * marginal_distance(SCHEMA, FRESH, REAL, ways)


def test_of_many_triples_the_same_hundred_are_looked_at() -> None:
    chosen = column_sets(20, 3)
    assert len(set(chosen)) == 100
    assert chosen == column_sets(20, 3)
    assert len(column_sets(9, 3)) == math.comb(9, 3)
    assert len(column_sets(20, 2)) == math.comb(20, 2)


def test_copies_are_no_distance_away_from_training_rows() -> None:
    assert (closest(SCHEMA, REAL[:50], REAL) == 0).all()
    assert np.median(closest(SCHEMA, FRESH[:200], REAL)) > 0


def test_the_distance_to_a_row_is_the_mean_over_columns() -> None:
    """10 of 100 years, no weight against one, another ward, the same stage, and the other answer."""
    row = np.array([[20, 100, 0, 1, 0]], dtype=np.float64)
    other = np.array([[30, np.nan, 1, 1, 1]], dtype=np.float64)
    assert closest(SCHEMA, row, other).tolist() == [pytest.approx((0.1 + 1 + 1 + 0 + 1) / 5)]
    assert closest(SCHEMA, other, np.concatenate([row, other])).tolist() == [0]


def test_rows_that_no_longer_speak_for_the_target_teach_nothing() -> None:
    real, nothing = (learned(SCHEMA, table, FRESH) for table in (REAL, shuffled(REAL, 4)))
    assert real.auc > 0.9
    assert nothing.auc == pytest.approx(0.5, abs=0.1)
    assert real.worst_level < real.accuracy


def test_rows_of_one_answer_give_that_answer() -> None:
    ill = REAL.copy()
    ill[:, 4] = 1
    found = learned(SCHEMA, ill, FRESH)
    assert found.auc == 0.5
    assert found.accuracy == pytest.approx(FRESH[:, 4].mean())


def test_the_worst_level_is_that_of_a_column_in_which_it_fails() -> None:
    """Of training rows of ward c all are said to be well: tests there fail as often as people are ill."""
    lied = REAL.copy()
    lied[lied[:, 2] == 2, 4] = 0
    found, there = learned(SCHEMA, lied, FRESH), FRESH[FRESH[:, 2] == 2]
    assert found.worst_level <= 1 - there[:, 4].mean() + 0.05


TABLE_METRICS = ("marginals", "column-shapes", "pair-trends", "table-utility", "closest-record", "fidelity")


@pytest.mark.parametrize("metric", TABLE_METRICS)
def test_metrics_of_tables_refuse_records_of_other_kinds(metric: str) -> None:
    federation = build_federation(tiny_config().data, Streams(0))
    with pytest.raises(ConfigError, match="rows of a table"):
        Evaluator(federation, EvaluationConfig(metrics=(metric,)), Streams(0))


def test_metrics_of_pictures_refuse_tables() -> None:
    federation = build_federation(load_config("tables/demo").data, Streams(0))
    with pytest.raises(ConfigError, match="metric 'frechet' makes no sense of rows of 13 columns"):
        Evaluator(federation, EvaluationConfig(metrics=("frechet",)), Streams(0))


@pytest.mark.parametrize(
    ("target", "installed", "reason"),
    [("", True, "the schema names no target"), ("ill", False, r"pip install 'fedloom\[eval\]'")],
)
def test_without_a_target_or_trees_nothing_is_foretold(
    target: str, installed: bool, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on: it has other metrics, and a base installation runs the demo."""
    if not installed:
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    nobody = torch.zeros(60, dtype=torch.int64)
    found = Records(torch.from_numpy(REAL[:60]), nobody, nobody, kind=modality_name(replace(SCHEMA, target=target)))
    small = ("method.components=4", "method.steps=5", "evaluation.samples=20", "evaluation.trackers=[]")
    config = load_config("tables/demo", [*small, "privacy={}", "evaluation.metrics=['table-utility', 'marginals']"])
    with pytest.warns(FedloomWarning, match=rf"metric 'table-utility' is left out: .*{reason}"):
        run = train(config, tmp_path / "run", Federation("patients", (Silo("a", found),), found, ("all",)))
    families = {key.partition("/")[0] for key in run.folder.metrics()[-1]}
    assert "marginals" in families
    assert "table-utility" not in families
