"""Tables from counts of pairs: what one record or subject moves, what is charged for it, and what is learned."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.config import Config
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment, train
from fedloom.federation.records import Federation, Records, Silo
from fedloom.methods.pair_counts import PairCounts
from fedloom.modalities.schema import Schema
from fedloom.modalities.table import modality_name
from fedloom.models.product_mixture import ProductMixture
from fedloom.privacy.accounting import Gaussian
from fedloom.privacy.noise import NoiseKey, StreamNoise
from fedloom.privacy.payload_sums import Query, SumNoise, Tally
from fedloom.settings import override, parse
from fedloom.streams import Streams

FEW = 4  # levels of a target that divides the counts, at most
MODEL, NOW = nn.Identity(), NoiseKey(0, 1, 0, "pairs")
TREE = {
    "columns": {
        "a": {"kind": "categorical", "levels": ["x", "y", "z"], "null": True},
        "b": {"kind": "integer", "bounds": [0, 9], "bins": 4},
        "c": {"kind": "continuous", "bounds": [0, 1], "bins": 2, "null": True},
        "d": {"kind": "ordinal", "levels": ["low", "high"]},
    },
}


def schema_of(target: str = "", *rules: str) -> Schema:
    return Schema.of({**TREE, "target": target, "rules": list(rules)})


def records(schema: Schema, codes: np.ndarray, subject: Tensor | None = None) -> Records:
    """A record for each row of codes."""
    x = torch.from_numpy(schema.values(codes, np.full(codes.shape, 0.5)))
    none = torch.zeros(len(x), dtype=torch.int64)
    return Records(x, none, none, subject=subject, kind=modality_name(schema))


def some(schema: Schema, count: int, seed: int = 0) -> Records:
    draw = np.random.default_rng(seed)
    return records(schema, draw.integers(0, schema.sizes, (count, len(schema.sizes))))


def tally(schema: Schema, rows: int = 1) -> Tally:
    pairs = PairCounts(schema, FEW)
    return Tally(pairs.count, pairs.of_one, rows)


class NoNoise(StreamNoise):
    """What is sent is what noise would be added to."""

    def normal(self, count: int, noise_key: NoiseKey, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(count)


def sent(statistic: Tally, found: Records, unit: Tensor | None) -> Tensor:
    """The vector that noise is added to."""
    if not len(found):
        return torch.zeros(1)
    noise = SumNoise(1.0, unit, NoNoise(Streams(0)))
    return statistic.value(Query(found, MODEL, Streams(0), NOW, noise))["counts"].double()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    count=st.integers(1, 12),
    target=st.sampled_from(["", "a", "d"]),
    subjects=st.integers(0, 4),
    rows=st.integers(1, 4),
)
def test_one_record_or_subject_moves_what_is_sent_by_at_most_the_stated_norm(
    seed: int, count: int, target: str, subjects: int, rows: int
) -> None:
    """Missing values and every level among them; a subject may have more rows than count, and all alike."""
    schema, draw = schema_of(target), np.random.default_rng(seed)
    found = some(schema, count, seed)
    if subjects and seed % 2:
        found = found.take(torch.zeros(count, dtype=torch.int64))
    whose = torch.arange(count) if not subjects else torch.from_numpy(draw.integers(0, subjects, count))
    _, unit = torch.unique(whose, return_inverse=True)
    stays = unit != unit[0]
    _, left = torch.unique(unit[stays], return_inverse=True)
    statistic = tally(schema, rows if subjects else 1)
    with_it = sent(statistic, found, unit if subjects else None)
    without = sent(statistic, found.take(torch.nonzero(stays).flatten()), left if subjects else None)
    moved = float(torch.linalg.vector_norm(with_it - without))
    assert moved <= statistic.bound * (1 + 1e-6)
    if not subjects:  # a record is one count in each pair of columns beside the target, whatever it is: the norm is met
        assert moved == pytest.approx(statistic.bound, rel=1e-5)


def test_a_subject_whose_rows_are_alike_moves_it_by_all_of_the_norm() -> None:
    schema = schema_of("d")
    found = some(schema, 1).take(torch.zeros(5, dtype=torch.int64))
    statistic = tally(schema, rows=3)
    moved = torch.linalg.vector_norm(sent(statistic, found, torch.zeros(5, dtype=torch.int64)))
    assert float(moved) == pytest.approx(statistic.bound, rel=1e-6)
    assert statistic.bound == pytest.approx(3 * math.sqrt(3))


@pytest.mark.parametrize(("target", "parts"), [("", 1), ("a", 4), ("b", 4), ("d", 2)])
def test_every_pair_of_columns_is_counted_once(target: str, parts: int) -> None:
    """For each level of the target, no value among them, where there is one; against one record after the other."""
    schema = schema_of(target)
    found, pairs = some(schema, 40), PairCounts(schema, FEW)
    matrices = pairs.matrices(pairs.count(MODEL, found)["counts"])
    expected = torch.zeros(parts, sum(pairs.sizes), sum(pairs.sizes), dtype=torch.float64)
    paired = [number for number, name in enumerate(schema.names) if name != target]
    starts = np.cumsum([0, *pairs.sizes])
    for row in schema.codes(found.x.numpy()):
        part = row[schema.names.index(target)] if target else 0
        for (i, a), (j, b) in itertools.permutations(enumerate(paired), 2):
            expected[part, starts[i] + row[a], starts[j] + row[b]] += 1
    assert torch.equal(matrices, expected)


@pytest.mark.parametrize(("few", "parts", "pairs_of_columns"), [(4, 4, 3), (3, 1, 6), (0, 1, 6)])
def test_a_target_of_few_levels_divides_the_counts(few: int, parts: int, pairs_of_columns: int) -> None:
    """The column "a" has three levels and no value."""
    pairs = PairCounts(schema_of("a"), few)
    assert pairs.parts == parts
    assert pairs.of_one == pytest.approx(math.sqrt(pairs_of_columns))


def test_a_target_beside_one_column_leaves_a_pair() -> None:
    columns = {name: {"kind": "ordinal", "levels": ["0", "1"]} for name in "ab"}
    assert PairCounts(Schema.of({"target": "a", "columns": columns}), FEW).of_one == 1.0
    with pytest.raises(ConfigError, match="the schema has one column"):
        PairCounts(Schema.of({"columns": {"a": columns["a"]}}), FEW)


def test_counts_that_depend_on_other_records_or_add_more_than_stated_are_refused() -> None:
    schema = schema_of()
    pairs, found = PairCounts(schema, FEW), some(schema, 6)

    def twice_where_two(model: nn.Module, records: Records) -> dict[str, Tensor]:
        return {"counts": pairs.count(model, records)["counts"] * (1 + (len(records) > 1))}

    tally(schema).check(found, MODEL)
    with pytest.raises(ConfigError, match=r"what a record adds to 'counts' depends on other records"):
        Tally(twice_where_two, pairs.of_one).check(found, MODEL)
    with pytest.raises(ConfigError, match=r"a record adds 2.449\d* to the counts, and 2.4 is stated"):
        Tally(pairs.count, 2.4).check(found, MODEL)


def federation_of(schema: Schema, silos: list[Records]) -> Federation:
    named = tuple(Silo(f"silo-{number}", found) for number, found in enumerate(silos))
    return Federation("tables", named, silos[0], ("all",))


def config(*overrides: str) -> Config:
    plain = ("rounds=1", "sharing.weights=equal", "evaluation.metrics=[]", "evaluation.trackers=[]")
    alone = ("engine.name=reference", "engine.workers=1", "engine.threads=1")
    return parse(Config, override({"method": {"name": "marginals"}}, [*plain, *alone, *overrides]))


DP = ("privacy.mechanism=dp-sgd", "privacy.epsilon=1.5", "privacy.delta=1e-4")


@pytest.mark.parametrize(("unit", "rows", "units"), [("record", 1, 30), ("subject", 2, 10)])
def test_what_is_charged_is_one_release_with_the_noise_that_was_added(unit: str, rows: int, units: int) -> None:
    schema = schema_of("d")
    found = replace(some(schema, 30), subject=torch.arange(30) // 3)
    overrides = (*DP, f"privacy.unit={unit}", f"method.rows={rows}", "method.components=5", "method.steps=10")
    trainer = Experiment.of(config(*overrides), federation_of(schema, [found])).trainer
    plan = trainer.privacy[0]
    charged = plan.events(1)
    noise = charged["pairs"]
    assert isinstance(noise, Gaussian)
    assert set(charged) == {"pairs"}
    added: list[float] = []

    class Noting(StreamNoise):
        def normal(self, count: int, noise_key: NoiseKey, device: torch.device | str = "cpu") -> Tensor:
            added.append(count)
            return torch.ones(count)

    statistic = trainer.method.payloads[0].statistic
    assert isinstance(statistic, Tally)
    number = found.subject if unit == "subject" else None
    query = Query(found, MODEL, Streams(0), NOW, SumNoise(noise.noise_multiplier, number, Noting(Streams(0))))
    value = statistic.value(query)["counts"].double()
    clean = sent(statistic, found, number)
    assert added == [value.numel()]
    expected = noise.noise_multiplier * rows * math.sqrt(3)
    torch.testing.assert_close(value - clean, torch.full_like(value, expected), rtol=1e-4, atol=1e-3)
    counted = float(clean.sum()) / 3  # every row is one count in each pair of the other columns
    assert counted == units * rows
    assert plan.events(2).get("pairs") is None


def mixture() -> tuple[Schema, np.ndarray, np.ndarray]:
    """Two kinds of records, each a product: their shares, and the chances of all levels."""
    schema = schema_of()
    draw = np.random.default_rng(5)
    chances = np.concatenate([draw.dirichlet(np.full(size, 0.7), 2) for size in schema.sizes], axis=1)
    return schema, np.array([0.3, 0.7]), chances


def pairs_of(schema: Schema, codes: np.ndarray) -> np.ndarray:
    there = np.eye(sum(schema.sizes))[codes + np.cumsum([0, *schema.sizes[:-1]])].sum(axis=1)
    return there.T @ there / len(codes)


def test_a_mixture_of_products_is_learned_from_silos_without_noise(tmp_path: Path) -> None:
    schema, shares, chances = mixture()
    draw = np.random.default_rng(1)
    kinds = draw.choice(2, 8000, p=shares)
    ends = np.cumsum(schema.sizes)[:-1]
    parts = [part[kinds].cumsum(axis=1) for part in np.split(chances, ends, axis=1)]
    codes = np.stack([(draw.random((8000, 1)) > part[:, :-1]).sum(axis=1) for part in parts], axis=1)
    silos = [records(schema, part) for part in np.split(codes, [1000, 3000])]
    run = train(
        config("method.components=20", "method.steps=400"), tmp_path / "run", federation=federation_of(schema, silos)
    )
    model = run.generator().model("all")
    assert isinstance(model, ProductMixture)
    levels = torch.cat([part.softmax(1) for part in torch.split(model.decoder.levels, model.sizes, 1)], 1)
    fitted = (levels.T @ (model.decoder.shares.softmax(0)[:, None] * levels)).numpy()
    exact = chances.T @ (shares[:, None] * chances)
    column = np.repeat(np.arange(4), schema.sizes)
    apart = column[:, None] != column[None, :]
    counted = pairs_of(schema, codes)
    assert np.abs(fitted - counted)[apart].max() < 0.005
    assert np.abs(fitted - exact)[apart].max() < 0.02
    made = run.generator().sample(20_000, group="all", seed=3)
    assert np.abs(pairs_of(schema, schema.codes(made.numpy())) - exact)[apart].max() < 0.02


def table_of(*sizes: int, target: str) -> Schema:
    """The schema of a table whose columns a, b, ... have so many levels."""
    columns = {
        name: {"kind": "ordinal", "levels": [str(level) for level in range(size)]}
        for name, size in zip("abcd", sizes, strict=False)
    }
    return Schema.of({"target": target, "columns": columns})


def made_of(schema: Schema, codes: np.ndarray, folder: Path, *overrides: str) -> np.ndarray:
    """The codes of rows from a run without noise."""
    small = config("method.components=20", "method.steps=300", *overrides)
    run = train(small, folder, federation=federation_of(schema, [records(schema, codes)]))
    return schema.codes(run.generator().sample(8000, group="all", seed=3).numpy())


def test_how_two_columns_together_speak_for_the_target_is_learned(tmp_path: Path) -> None:
    """The target says whether the other two are alike: no pair of columns knows of it."""
    draw = np.random.default_rng(0).integers(0, 2, (4000, 2))
    codes = np.stack([draw[:, 0], draw[:, 0] == draw[:, 1], draw[:, 1]], axis=1).astype(np.int64)
    schema, right = table_of(2, 2, 2, target="b"), {}
    for few in (FEW, 0):
        made = made_of(schema, codes, tmp_path / str(few), f"method.target_levels={few}")
        right[few] = float(((made[:, 0] == made[:, 2]) == made[:, 1]).mean())
    assert right[FEW] > 0.97
    assert right[0] == pytest.approx(0.5, abs=0.05)


def test_levels_of_the_target_are_as_frequent_as_counted(tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(0, (3, 2, 3, 2), (5000, 4))
    codes[:3000, 2] = 1
    made = made_of(table_of(3, 2, 3, 2, target="c"), codes, tmp_path / "run")
    shares = [np.bincount(each[:, 2], minlength=3) / len(each) for each in (codes, made)]
    np.testing.assert_allclose(*shares, atol=0.02)


def test_there_is_a_component_for_each_level_of_the_target() -> None:
    schema = schema_of("a")
    with pytest.raises(ConfigError, match=r"method.components = 3 is below 4, the levels of the target"):
        Experiment.of(config("method.components=3"), federation_of(schema, [some(schema, 5)]))


def test_samples_keep_to_the_rules_and_do_not_depend_on_how_many_there_are(tmp_path: Path) -> None:
    schema = schema_of("", "if a is x then d is high")
    found = some(schema, 400)
    kept = found.take(torch.nonzero(torch.from_numpy(schema.checks[0].holds(found.x.numpy()))).flatten())
    small = config("method.components=10", "method.steps=100")
    run = train(small, tmp_path / "run", federation=federation_of(schema, [kept]))
    many = run.generator().sample(600, group="all", seed=4)
    assert schema.broken_rules(many.numpy()) == []
    few = run.generator().sample(7, group="all", seed=4)
    np.testing.assert_array_equal(many[:7].numpy(), few.numpy())


def test_counts_of_silos_that_come_later_are_added(tmp_path: Path) -> None:
    schema = schema_of()
    silos = [some(schema, 30, seed) for seed in range(2)]
    late = config("method.components=5", "method.steps=20", "rounds=8", "participation.rate=0.5")
    run = train(late, tmp_path / "late", federation=federation_of(schema, silos))
    came = {json.loads(line)["round"] for line in (tmp_path / "late" / "egress.jsonl").read_text().splitlines()}
    assert len(came) > 1  # not all at once
    pairs = PairCounts(schema, FEW)
    whole = sum((pairs.count(MODEL, found)["counts"] for found in silos), torch.zeros(()))
    assert torch.equal(run.generator().server.memory["counts"].double(), whole.double())


def test_a_domain_that_is_too_large_is_refused_with_its_largest_columns() -> None:
    columns = {f"c{n}": {"kind": "integer", "bounds": [0, 99_999], "bins": 900 + n} for n in range(5)}
    schema = Schema.of({"columns": columns})
    found = some(schema, 3)
    with pytest.raises(
        ConfigError,
        match=r"at most 4,000 levels and bins, and the schema's columns have 4,510: give fewer to 'c4' \(904\), 'c3'",
    ):
        Experiment.of(config(), federation_of(schema, [found]))


def test_records_that_are_no_table_are_refused() -> None:
    plain = Records(torch.rand(5, 3), torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ConfigError, match="marginals"):
        Experiment.of(config(), Federation("v", (Silo("a", plain),), plain, ("all",)))


def test_an_attack_that_looks_for_near_records_is_refused(tmp_path: Path) -> None:
    schema = schema_of()
    federation = federation_of(schema, [some(schema, 60)])
    with pytest.raises(ConfigError, match=r"audit.canaries = 20 must be 0 for rows of 4 columns: no attack looks for"):
        Experiment.of(config("audit.canaries=20"), federation)
