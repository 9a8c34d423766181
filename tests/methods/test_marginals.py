"""Counts of pairs and the mixture that is fitted to them: what one record adds, and what is learned."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedloom.errors import ConfigError
from fedloom.federation.records import Records
from fedloom.methods.marginals import FitPairs, MarginalsOptions
from fedloom.methods.pair_counts import PairCounts
from fedloom.modalities.schema import Numbers, Schema
from fedloom.models.product_mixture import ProductMixture
from fedloom.privacy.noise import NoiseKey
from fedloom.privacy.payload_sums import Query, SumNoise, Tally
from fedloom.streams import Streams

MODEL = nn.Identity()


class Still:
    """Noise that is none."""

    def normal(self, count: int, key: NoiseKey) -> torch.Tensor:
        return torch.zeros(count)


def schema_of_levels(*sizes: int, target: str = "", null: bool = False) -> Schema:
    """Columns a, b, ... of so many levels."""
    names = "abcdefgh"
    columns = {
        names[number]: {"kind": "ordinal", "levels": [str(level) for level in range(size)], "null": null}
        for number, size in enumerate(sizes)
    }
    return Schema.of({"target": target, "columns": columns})


def records(values: Numbers) -> Records:
    nobody = torch.zeros(len(values), dtype=torch.int64)
    return Records(torch.from_numpy(values), nobody, nobody)


def table(schema: Schema, count: int, seed: int) -> Numbers:
    """Rows of any levels, and of no value where that may be."""
    draw = np.random.default_rng(seed)
    codes = np.stack([draw.integers(0, size, count) for size in schema.sizes], axis=1)
    return schema.values(codes, draw.random(codes.shape))


SCHEMAS = [
    schema_of_levels(2, 3, 4),
    schema_of_levels(2, 3, 4, null=True),
    schema_of_levels(2, 3, 4, 2, target="a"),
    schema_of_levels(2, 3, 2, 2, target="c", null=True),
    schema_of_levels(2, 3, 9, target="c"),  # too many levels to divide the counts
    schema_of_levels(2, 3, target="a"),  # nothing would be left to pair
]


@settings(max_examples=40, deadline=None)
@given(schema=st.sampled_from(SCHEMAS), seed=st.integers(0, 2**16), subjects=st.integers(0, 6), most=st.integers(1, 3))
def test_a_unit_less_moves_the_counts_by_at_most_the_bound(schema: Schema, seed: int, subjects: int, most: int) -> None:
    """Records or subjects, levels and no values: and a record moves them by exactly what is stated."""
    pairs, values = PairCounts(schema, 4), table(schema, 30, seed)
    tally = Tally(pairs.count, pairs.of_one, most if subjects else 1)
    unit = torch.from_numpy(np.random.default_rng(seed).integers(0, subjects, 30)) if subjects else torch.arange(30)
    unit = torch.unique(unit, return_inverse=True)[1]
    stays = unit != unit[0]
    released = []
    for kept in (torch.ones(30, dtype=torch.bool), stays):
        units = torch.unique(unit[kept], return_inverse=True)[1] if kept.any() else unit[kept]
        noise = SumNoise(0.0, units if subjects else None, Still())  # type: ignore[arg-type]
        query = Query(records(values[kept.numpy()]), MODEL, Streams(0), NoiseKey(0, 1, 0, "pairs"), noise)
        released.append(tally.value(query)["counts"].double())
    moved = float((released[0] - released[1]).norm())
    assert moved <= tally.bound * (1 + 1e-9)
    if not subjects:
        assert moved == pytest.approx(pairs.of_one)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_counts_are_those_of_pairs(schema: Schema) -> None:
    """Against counting one record after the other."""
    pairs, values = PairCounts(schema, 4), table(schema, 50, 3)
    matrices = pairs.matrices(pairs.count(MODEL, records(values))["counts"])
    starts, paired = np.cumsum((0, *pairs.sizes)), [n for n in range(len(schema.sizes)) if n != pairs.target]
    expected = torch.zeros_like(matrices)
    for codes in schema.codes(values):
        part = 0 if pairs.target is None else codes[pairs.target]
        for (i, a), (j, b) in itertools.permutations(enumerate(paired), 2):
            expected[part, starts[i] + codes[a], starts[j] + codes[b]] += 1
    assert torch.equal(matrices, expected)


@pytest.mark.parametrize(("levels", "parts", "of_one"), [(4, 3, math.comb(3, 2)), (2, 1, math.comb(4, 2))])
def test_a_target_of_few_levels_divides_the_counts(levels: int, parts: int, of_one: int) -> None:
    pairs = PairCounts(schema_of_levels(2, 3, 4, 2, target="b"), levels)
    assert pairs.parts == parts
    assert pairs.of_one == pytest.approx(math.sqrt(of_one))


def drawn(schema: Schema, values: Numbers, options: MarginalsOptions, count: int) -> Numbers:
    """Codes of a mixture that is fitted to exact counts."""
    pairs = PairCounts(schema, options.target_levels)
    step = FitPairs(pairs, options, 0)
    made = step._fit(pairs.count(MODEL, records(values))["counts"])
    model = ProductMixture(schema.sizes, len(made["shares"]))
    model.decoder.load_state_dict(made)
    noise = torch.Generator().manual_seed(0)
    component, columns = (torch.randn(count, size, generator=noise) for size in (1, len(schema.sizes)))
    return model.generate(component, columns).numpy()


def test_how_two_columns_together_speak_for_the_target_is_learned() -> None:
    """The target says whether the other two are alike: no pair of columns knows of it."""
    schema = schema_of_levels(2, 2, 2, target="b")
    draw = np.random.default_rng(0).integers(0, 2, (4000, 2))
    values = np.stack([draw[:, 0], draw[:, 0] == draw[:, 1], draw[:, 1]], axis=1).astype(np.float64)

    def right(levels: int) -> float:
        rows = drawn(schema, values, MarginalsOptions(components=20, steps=300, target_levels=levels), 4000)
        return float(((rows[:, 0] == rows[:, 2]) == rows[:, 1]).mean())

    assert right(4) > 0.97
    assert right(0) == pytest.approx(0.5, abs=0.05)


def test_levels_of_the_target_are_as_frequent_as_counted() -> None:
    schema = schema_of_levels(3, 2, 3, 2, target="c")
    values = table(schema, 5000, 0)
    values[:3000, 2] = 1
    rows = drawn(schema, values, MarginalsOptions(components=12, steps=50), 20_000)
    shares = np.bincount(schema.codes(values)[:, 2], minlength=3) / 5000
    np.testing.assert_allclose(np.bincount(rows[:, 2], minlength=3) / 20_000, shares, atol=0.01)


def test_counts_of_nobody_make_rows() -> None:
    """A silo with noise alone: numbers that are finite, whatever was counted."""
    schema = schema_of_levels(2, 3, 4, 2, target="a")
    pairs = PairCounts(schema, 4)
    noise = torch.randn(pairs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made = FitPairs(pairs, MarginalsOptions(components=8, steps=50), 0)._fit(100 * noise)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in made.values())


def test_a_table_of_one_column_has_no_pairs() -> None:
    with pytest.raises(ConfigError, match="the schema has one column"):
        PairCounts(schema_of_levels(3), 4)
