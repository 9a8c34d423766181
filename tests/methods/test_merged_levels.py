"""Levels that are merged by noisy counts: which, what that costs, and what is learned of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.config import Config
from fedloom.errors import ConfigError
from fedloom.evaluation.table_marginals import marginal_distance
from fedloom.experiment import Experiment, train
from fedloom.federation.records import Federation, Records, Silo
from fedloom.methods.merged_levels import MergedLevels
from fedloom.methods.pair_counts import PairCounts
from fedloom.modalities.schema import Schema
from fedloom.modalities.table import modality_name
from fedloom.models.product_mixture import ProductMixture
from fedloom.privacy.accounting import Budget, Gaussian
from fedloom.privacy.silo_privacy import whole_noise
from fedloom.settings import override, parse

TREE: dict[str, dict[str, Any]] = {
    "cost": {"kind": "integer", "bounds": [0, 999], "bins": 200, "null": True},
    "drug": {"kind": "categorical", "levels": [f"drug {number}" for number in range(30)]},
    "sex": {"kind": "categorical", "levels": ["f", "m"]},
}
SCHEMA = Schema.of({"columns": TREE})


def rows(count: int, seed: int = 0) -> np.ndarray:
    """Most costs are small, and of two drugs; men have higher ones. A tenth of costs is unknown."""
    draw = np.random.default_rng(seed)
    sex = draw.integers(0, 2, count)
    cost = np.minimum(draw.exponential(20 + 60 * sex).astype(int), 999).astype(float)
    drug = np.where(draw.random(count) < 0.8, 7 + 6 * sex, draw.integers(0, 30, count))
    return np.stack([np.where(draw.random(count) < 0.1, np.nan, cost), drug, sex], axis=1)


def records(table: np.ndarray) -> Records:
    nobody = torch.zeros(len(table), dtype=torch.int64)
    return Records(torch.from_numpy(table), nobody - 1, nobody, kind=modality_name(SCHEMA))


def config(*overrides: str) -> Config:
    plain = ("rounds=2", "sharing.weights=equal", "evaluation.metrics=[]", "evaluation.trackers=[]")
    small = ("engine.name=reference", "engine.workers=1", "engine.threads=1", "method.components=20")
    return parse(Config, override({"method": {"name": "marginals", "levels": 6}}, [*plain, *small, *overrides]))


def federation(*tables: np.ndarray) -> Federation:
    silos = tuple(Silo(f"silo-{number}", records(table)) for number, table in enumerate(tables))
    return Federation("costs", silos, records(rows(50, 9)), ("all",))


def test_neighbours_are_merged_to_equal_weight_and_a_heavy_level_stays_alone() -> None:
    ordered = Schema.of({"columns": {"a": {"kind": "ordinal", "levels": list("abcdefg"), "null": True}}})
    merged = MergedLevels(ordered, 4)
    found = merged.merged(torch.tensor([60.0, 1, 9, -3, 10, 6, 4, 5]))
    # The first level is more than a quarter; what is left, 30, goes to three runs of ten. No value is beside them.
    assert found["places"].tolist() == [0, 1, 1, 1, 2, 3, 3, 4]
    assert found["within"].tolist() == pytest.approx([1, 0.1, 0.9, 0, 1, 0.6, 0.4, 1])


def test_of_levels_without_order_the_frequent_ones_stay() -> None:
    named = Schema.of({"columns": {"a": {"kind": "categorical", "levels": list("abcde")}}})
    found = MergedLevels(named, 3).merged(torch.tensor([5.0, 50, 3, 40, 2]))
    assert found["places"].tolist() == [2, 0, 2, 1, 2]
    assert found["within"].tolist() == pytest.approx([0.5, 1, 0.3, 1, 0.2])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**16), count=st.integers(1, 20))
def test_a_record_is_one_count_in_each_column_and_pair_whatever_came_down(seed: int, count: int) -> None:
    """A server may send any places: what one record adds has the stated norm all the same."""
    pairs, draw = PairCounts(SCHEMA, 0, 6), np.random.default_rng(seed)
    merged, model = pairs.merged, ProductMixture(pairs.merged.sizes, 5, sum(pairs.merged.levels))
    limits = np.repeat([merged.sizes[number] for number in merged.wide], merged.levels)
    model.decoder.places = torch.from_numpy(draw.integers(0, limits))
    found = records(rows(count, seed))
    fewer = found.take(torch.arange(1, count))
    for counting, norm in ((merged.count, merged.of_one), (pairs.count, pairs.of_one)):
        moved = counting(model, found)["counts"] - (counting(model, fewer)["counts"] if count > 1 else 0)
        assert float(moved.double().norm()) == pytest.approx(norm)
    assert merged.of_one == math.sqrt(2)


def test_both_releases_are_charged_and_make_up_the_budget() -> None:
    private = ("privacy.mechanism=dp-sgd", "privacy.epsilon=1.0", "privacy.delta=1e-5")
    trainer = Experiment.of(config(*private), federation(rows(300))).trainer
    plan, whole = trainer.privacy[0], whole_noise(Budget(1.0, 1e-5))
    for number, (name, share) in enumerate((("columns", 0.1), ("pairs", 0.9)), start=1):
        events = plan.events(number)
        assert set(events) == {name}
        event = events[name]
        assert isinstance(event, Gaussian)
        assert event.noise_multiplier == pytest.approx(whole / math.sqrt(share))


def test_merged_levels_are_learned_from_silos_and_come_back_as_they_were(tmp_path: Path) -> None:
    table = rows(6000)
    run = train(config("method.steps=300"), tmp_path / "run", federation(table[:2000], table[2000:]))
    made = run.generator().sample(20_000, group="all", seed=1).numpy()
    assert np.isnan(made[:, 0]).mean() == pytest.approx(np.isnan(table[:, 0]).mean(), abs=0.01)
    for men in (0, 1):
        real, synthetic = (np.nanmedian(each[each[:, 2] == men, 0]) for each in (table, made))
        assert synthetic == pytest.approx(real, rel=0.15)
    assert marginal_distance(SCHEMA, made, table, 1) < 0.03


def test_bins_that_counts_chose_say_more_than_as_many_of_equal_width(tmp_path: Path) -> None:
    """At epsilon 1, both paid for; nearly all costs lie in the first of six bins of equal width."""
    table, found = rows(6000), {}
    private = ("privacy.mechanism=dp-sgd", "privacy.epsilon=1.0", "privacy.delta=1e-5", "privacy.noise=test")
    tree = {"columns": {**TREE, "cost": {**TREE["cost"], "bins": 6}}}
    for schema, levels in ((SCHEMA, 6), (Schema.of(tree), 0)):
        silo = Silo("a", replace(records(table), kind=modality_name(schema)))
        settings = (*private, f"method.levels={levels}", "method.steps=200")
        run = train(config(*settings), tmp_path / str(levels), Federation("a", (silo,), silo.train, ("all",)))
        made = run.generator().sample(6000, group="all", seed=1).numpy()
        found[levels] = marginal_distance(SCHEMA, made, table, 1)
    assert found[6] < found[0] / 2


@pytest.mark.parametrize("wrong", ["rounds=1", "participation.rate=0.5"])
def test_merging_takes_two_rounds_of_everybody(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"method.levels = 6 needs rounds = 2 and participation.rate = 1: .* 'cost'"):
        Experiment.of(config(wrong), federation(rows(100), rows(100, 1)))


def test_where_no_column_is_wide_nothing_is_released_for_it() -> None:
    trainer = Experiment.of(config("method.levels=300", "rounds=1"), federation(rows(100))).trainer
    assert [rule.name for rule in trainer.method.payloads] == ["pairs"]
