"""Tables from counts of pairs: what one record or subject moves, what is charged for it, and what is learned."""

from __future__ import annotations

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
from fedloom.models.product_mixture import ProductMixture, drawn
from fedloom.privacy.accounting import Gaussian
from fedloom.privacy.noise import NoiseKey, StreamNoise
from fedloom.privacy.payload_sums import Query, SumNoise, Tally
from fedloom.settings import override, parse
from fedloom.streams import Streams

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


def tally(schema: Schema, weight: float = 2.0, rows: int = 1) -> Tally:
    pairs = PairCounts(schema, weight)
    return Tally(pairs.count, pairs.weigh, pairs.of_one, rows)


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
    weight=st.floats(0.1, 10),
    subjects=st.integers(0, 4),
    rows=st.integers(1, 4),
)
def test_one_record_or_subject_moves_what_is_sent_by_at_most_the_stated_norm(
    seed: int, count: int, target: str, weight: float, subjects: int, rows: int
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
    statistic = tally(schema, weight, rows if subjects else 1)
    with_it = sent(statistic, found, unit if subjects else None)
    without = sent(statistic, found.take(torch.nonzero(stays).flatten()), left if subjects else None)
    moved = float(torch.linalg.vector_norm(with_it - without))
    assert moved <= statistic.bound * (1 + 1e-6)
    if not subjects:  # a record is one count in each pair of columns, whatever it is: the norm is met
        assert moved == pytest.approx(statistic.bound, rel=1e-5)


def test_a_subject_whose_rows_are_alike_moves_it_by_all_of_the_norm() -> None:
    schema = schema_of("d")
    found = some(schema, 1).take(torch.zeros(5, dtype=torch.int64))
    statistic = tally(schema, rows=3)
    moved = torch.linalg.vector_norm(sent(statistic, found, torch.zeros(5, dtype=torch.int64)))
    assert float(moved) == pytest.approx(statistic.bound, rel=1e-6)
    assert statistic.bound == pytest.approx(3 * math.sqrt(3 + 3 * 2.0**2))


@pytest.mark.parametrize("seed", range(3))
def test_every_pair_of_columns_is_counted_once(seed: int) -> None:
    schema = schema_of("d")
    found = some(schema, 40, seed)
    pairs = PairCounts(schema, 2.0)
    counts = pairs.count(MODEL, found)["counts"].numpy()
    codes = schema.codes(found.x.numpy())
    starts = np.cumsum([0, *schema.sizes[:-1]])
    expected = np.zeros_like(counts)
    for row in codes + starts:
        for i in range(len(row)):
            for j in range(i + 1, len(row)):
                expected[row[i], row[j]] += 1
    assert np.array_equal(counts, expected)
    weighed = pairs.weigh({"counts": torch.from_numpy(counts)})["counts"].numpy()
    last = starts[-1]
    assert np.array_equal(weighed[:, :last], expected[:, :last])
    assert np.array_equal(weighed[:, last:], 2.0 * expected[:, last:])


def test_counts_that_depend_on_other_records_or_add_more_than_stated_are_refused() -> None:
    schema = schema_of()
    pairs, found = PairCounts(schema, 2.0), some(schema, 6)

    def twice_where_two(model: nn.Module, records: Records) -> dict[str, Tensor]:
        return {"counts": pairs.count(model, records)["counts"] * (1 + (len(records) > 1))}

    tally(schema).check(found, MODEL)
    with pytest.raises(ConfigError, match=r"what a record adds to 'counts' depends on other records"):
        Tally(twice_where_two, pairs.weigh, pairs.of_one).check(found, MODEL)
    with pytest.raises(ConfigError, match=r"a record adds 2.449\d* to the counts, and 2.4 is stated"):
        Tally(pairs.count, pairs.weigh, 2.4).check(found, MODEL)


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
    expected = noise.noise_multiplier * rows * math.sqrt(3 + 3 * 2.0**2)
    torch.testing.assert_close(value - clean, torch.full_like(value, expected), rtol=1e-4, atol=1e-3)
    counted = float(clean.sum()) / (3 + 3 * 2.0)  # every row is one count in each pair
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


def test_what_is_drawn_has_the_chances_that_it_should() -> None:
    chances = torch.tensor([0.2, 0.0, 0.5, 0.3], dtype=torch.float64)
    found = drawn(chances.expand(200_000, 4), torch.randn(200_000, generator=torch.Generator().manual_seed(1)))
    shares = torch.bincount(found, minlength=4).double() / 200_000
    assert float(shares[1]) == 0.0
    torch.testing.assert_close(shares, chances, atol=0.005, rtol=0)
    ends = torch.tensor([-40.0, 40.0])
    assert drawn(chances.expand(2, 4), ends).tolist() == [0, 3]


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
    pairs = PairCounts(schema, 2.0)
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
