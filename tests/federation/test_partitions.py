from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.config import DataConfig
from fedloom.errors import ConfigError, FedloomError
from fedloom.federation.partitions import PARTITIONS, SIZED, divide
from fedloom.federation.records import UNLABELLED, Dataset, Records
from fedloom.streams import Streams


def dataset(labels: list[int], groups: list[int] | None = None, owner: list[int] | None = None) -> Dataset:
    """Record i holds the value i, so that what a silo got can be read off."""
    y = torch.tensor(labels)
    group = torch.tensor(groups if groups is not None else [0] * len(labels))
    records = Records(x=torch.arange(len(labels), dtype=torch.float32)[:, None], y=y, group=group)
    return Dataset(
        name="toy",
        train=records,
        test=records,
        groups=tuple(f"g{i}" for i in range(int(group.max()) + 1)),
        classes=tuple(f"c{i}" for i in range(int(y.max()) + 1)),
        owners=tuple(f"o{i}" for i in range(max(owner) + 1)) if owner else (),
        owner=torch.tensor(owner) if owner else None,
    )


def shares(data: Dataset, seed: int = 0, **settings: object) -> dict[str, list[int]]:
    divided = divide(data, DataConfig(**settings), Streams(seed))  # type: ignore[arg-type]
    return {name: index.tolist() for name, index in divided}


@settings(max_examples=60, deadline=None)
@given(
    partition=st.sampled_from(["groups", "iid", "dirichlet", "shards", "natural", "classes"]),
    sizes=st.sampled_from(["equal", "unequal"]),
    silos=st.integers(1, 7),
    classes_per_silo=st.integers(1, 3),
    alpha=st.sampled_from([1e-300, 1e-4, 0.1, 1.0, 1e6]),
    spare=st.integers(0, 50),
    seed=st.integers(0, 2**32),
)
def test_every_record_goes_to_exactly_one_silo_and_no_silo_is_empty(
    partition: str, sizes: str, silos: int, classes_per_silo: int, alpha: float, spare: int, seed: int
) -> None:
    count = 2 * silos * classes_per_silo + spare  # two groups and all classes are then large enough
    data = dataset(
        labels=[i % (silos * classes_per_silo) for i in range(count)],
        groups=[i % 2 for i in range(count)],
        owner=[i % silos for i in range(count)],
    )
    held = shares(
        data,
        seed,
        partition=partition,
        sizes=sizes if partition in SIZED else "equal",
        silos=silos,
        classes_per_silo=classes_per_silo,
        alpha=alpha,
    )
    assert len(held) == (2 * silos if partition == "groups" else silos)
    assert all(held.values())
    assert sorted(i for index in held.values() for i in index) == list(range(count))


@given(total=st.integers(1, 3000), silos=st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_equal_sizes_differ_by_at_most_one(total: int, silos: int) -> None:
    sizes = [len(v) for v in shares(dataset([0] * (total + silos)), partition="iid", silos=silos).values()]
    assert max(sizes) - min(sizes) <= 1


def test_groups_keep_each_silo_in_one_group() -> None:
    data = dataset([0] * 10, groups=[0, 1] * 5)
    held = shares(data, partition="groups", silos=2)
    assert {name: len(index) for name, index in held.items()} == {"g0-0": 3, "g0-1": 2, "g1-0": 3, "g1-1": 2}
    assert sorted(held["g0-0"] + held["g0-1"]) == [0, 2, 4, 6, 8]
    assert sorted(held["g1-0"] + held["g1-1"]) == [1, 3, 5, 7, 9]


def test_disjoint_classes_are_consecutive_pairs_and_the_rest_is_nobodys() -> None:
    held = shares(dataset([4, 3, 2, 1, 0, 0, 1, 2]), partition="classes", silos=2, classes_per_silo=2)
    assert held == {"silo-0": [3, 4, 5, 6], "silo-1": [1, 2, 7]}


def test_of_each_class_the_first_records_are_taken() -> None:
    labels = [4, 3, 2, 1, 0, 0, 1, 2, 0, 3]
    held = shares(dataset(labels), partition="classes", silos=2, classes_per_silo=2, records_per_class=1)
    assert held == {"silo-0": [3, 4], "silo-1": [1, 2]}
    with pytest.raises(ConfigError, match=r"data.records_per_class is for data.partition = 'classes', not 'iid'"):
        shares(dataset(labels), partition="iid", silos=2, records_per_class=1)


def test_natural_follows_the_owners_whatever_silos_says() -> None:
    data = dataset([0] * 5, owner=[1, 0, 1, 2, 0])
    assert shares(data, partition="natural", silos=99) == {"o0": [1, 4], "o1": [0, 2], "o2": [3]}


@pytest.mark.parametrize("seed", range(5))
def test_shards_leave_a_silo_with_few_classes_and_equal_sizes(seed: int) -> None:
    labels = [i % 10 for i in range(1000)]
    held = shares(dataset(labels), seed, partition="shards", silos=10, classes_per_silo=2)
    # 20 shards of 50 over ten classes of 100: every shard lies within one class.
    assert all(len(index) == 100 for index in held.values())
    assert all(len({labels[i] for i in index}) <= 2 for index in held.values())


def skew(alpha: float) -> float:
    """The mean share of a silo's largest class, over silos and seeds; 0.1 if all ten classes are even."""
    labels = [i % 10 for i in range(2000)]
    tops = []
    for seed in range(5):
        for index in shares(dataset(labels), seed, partition="dirichlet", silos=10, alpha=alpha).values():
            histogram = torch.bincount(torch.tensor([labels[i] for i in index]), minlength=10)
            tops.append(int(histogram.max()) / len(index))
    return sum(tops) / len(tops)


def test_dirichlet_is_skewed_for_small_alpha_and_even_for_large() -> None:
    assert skew(1e6) == pytest.approx(0.1, abs=0.005)  # 200 a class over 10 silos: 20 each
    assert skew(0.05) > 0.6 > skew(0.5) > skew(1e6)


def test_dirichlet_fills_empty_silos_from_the_richest() -> None:
    # So small an alpha gives a class whole to one silo: one class, so all others take a single record.
    held = shares(dataset([0] * 10), partition="dirichlet", silos=4, alpha=1e-300)
    assert sorted(map(len, held.values())) == [1, 1, 1, 7]


@pytest.mark.parametrize("partition", ["groups", "iid", "dirichlet", "shards"])
def test_the_seed_decides(partition: str) -> None:
    data = dataset([i % 5 for i in range(200)])
    first, again, other = (shares(data, seed, partition=partition, silos=5) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("partition", SIZED)
def test_unequal_sizes_differ_by_several_times(partition: str) -> None:
    held = shares(dataset([0] * 5000), partition=partition, silos=10, sizes="unequal")
    sizes = [len(index) for index in held.values()]
    assert sum(sizes) == 5000
    assert max(sizes) > 3 * min(sizes)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_records_per_silo_caps_with_a_random_subset(partition: str) -> None:
    data = dataset([i % 4 for i in range(400)], owner=[i % 2 for i in range(400)])
    whole = shares(data, partition=partition, silos=2)
    capped = shares(data, partition=partition, silos=2, records_per_silo=20)
    assert whole.keys() == capped.keys()
    for name, index in capped.items():
        assert len(set(index)) == min(20, len(whole[name]))
        assert set(index) <= set(whole[name])
        assert index != whole[name][:20]


LABELLED = dataset([0, 1, 2, 3, 0, 1])
UNLABELLED_TOY = Dataset(
    "toy",
    Records(torch.zeros(6, 1), torch.full((6,), UNLABELLED), torch.zeros(6, dtype=torch.int64)),
    LABELLED.test,
    ("g0",),
)


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (LABELLED, {"partition": "grups"}, "unknown partition 'grups'; did you mean 'groups'?"),
        (
            LABELLED,
            {"partition": "groups", "silos": 7},
            "needs at least 7 training records, but group 'g0' has 6",
        ),
        (
            LABELLED,
            {"partition": "iid", "silos": 7},
            "needs at least 7 training records, but the source has 6",
        ),
        (LABELLED, {"partition": "dirichlet", "silos": 7}, "data.silos = 7"),
        (
            LABELLED,
            {"partition": "dirichlet", "silos": 2, "alpha": float("inf")},
            "data.alpha = inf must be fin",
        ),
        (LABELLED, {"partition": "shards", "silos": 4}, "needs at least 8 training records"),
        (LABELLED, {"partition": "classes", "silos": 3}, "needs 6 classes, but .* has 4"),
        (LABELLED, {"partition": "natural"}, "needs a source that knows who holds what"),
        (LABELLED, {"partition": "shards", "silos": 2, "sizes": "unequal"}, "applies to groups and iid"),
        *(
            (UNLABELLED_TOY, {"partition": name, "silos": 2}, "needs a class for every record")
            for name in ("dirichlet", "classes", "shards")
        ),
    ],
)
def test_impossible_requests_are_named(data: Dataset, settings: dict[str, object], message: str) -> None:
    with pytest.raises(FedloomError, match=message):
        shares(data, **settings)
