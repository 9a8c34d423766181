import pytest
import torch
from torch import Tensor

from fedloom.errors import DataError
from fedloom.evaluation.domain import DomainClassifier, blend_rate, domain_hit_rate
from fedloom.federation.records import Dataset, Records
from fedloom.streams import Streams


def drawings(shape: tuple[int, ...], count: int, seed: int) -> list[Tensor]:
    """Two domains of [0, 1] values: bars at a random place of the last axis, soft noise around grey."""
    generator = torch.Generator().manual_seed(seed)
    bars = 0.1 * torch.rand(count, *shape, generator=generator)
    place = torch.randint(0, shape[-1], (count,), generator=generator)
    bars[torch.arange(count), ..., place] = 1.0
    noise = 0.3 + 0.4 * torch.rand(count, *shape, generator=generator)
    return [bars, noise]


def table(domains: list[Tensor]) -> Records:
    group = torch.cat([torch.full((len(x),), number) for number, x in enumerate(domains)])
    return Records(x=torch.cat(domains), y=torch.full((len(group),), -1), group=group)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 40, 36), (24,)])
def test_groups_are_told_apart_and_blends_are_seen(shape: tuple[int, ...]) -> None:
    classifier = DomainClassifier.fit(table(drawings(shape, 400, seed=1)), 2, Streams(0), steps=150)
    bars, noise = drawings(shape, 200, seed=2)
    for group, x in enumerate((bars, noise)):
        assert domain_hit_rate(classifier.probabilities(x), group) > 0.97
        assert blend_rate(classifier.probabilities(x)) < 0.1
    assert blend_rate(classifier.probabilities((bars + noise) / 2)) > 0.9


def test_digits_and_garments(mixed_mnist: Dataset, held_out: list[Tensor]) -> None:
    classifier = DomainClassifier.fit(mixed_mnist.train, 2, Streams(0))
    for group, images in enumerate(held_out):
        assert domain_hit_rate(classifier.probabilities(images), group) > 0.97
        assert blend_rate(classifier.probabilities(images)) < 0.15
    assert blend_rate(classifier.probabilities((held_out[0] + held_out[1]) / 2)) > 0.9


def test_fit_is_a_function_of_the_seed_and_leaves_global_randomness_alone() -> None:
    records = table(drawings((1, 8, 8), 60, seed=1))
    probe = drawings((1, 8, 8), 5, seed=2)[0]
    before = torch.random.get_rng_state()
    first, again, other = (
        DomainClassifier.fit(records, 2, Streams(seed), steps=20).probabilities(probe) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_subsampling_balances_the_groups() -> None:
    # 900 records of group 0 against 30 of group 1: limit 60 leaves 30 of each, a prior of one half.
    x = torch.full((930, 1, 8, 8), 0.5)
    group = torch.cat([torch.zeros(900), torch.ones(30)]).long()
    records = Records(x=x, y=group, group=group)
    probabilities = DomainClassifier.fit(records, 2, Streams(0), limit=60, steps=150).probabilities(x[:1])
    assert probabilities[0, 0].item() == pytest.approx(0.5, abs=0.05)


def test_rates_on_known_probabilities() -> None:
    probabilities = torch.tensor([[0.95, 0.05], [0.6, 0.4], [0.2, 0.8], [0.05, 0.95]])
    assert domain_hit_rate(probabilities, 0) == 0.5
    assert domain_hit_rate(probabilities[:3], 1) == pytest.approx(1 / 3)
    assert blend_rate(probabilities) == 0.5
    assert blend_rate(probabilities, threshold=0.7) == 0.25


def test_stored_bytes_and_generated_floats_mean_the_same() -> None:
    bars, noise = drawings((1, 8, 8), 60, seed=1)
    stored = [(255 * x).round().to(torch.uint8) for x in (bars, noise)]
    as_seen = [x.float() / 255 for x in stored]
    results = [
        DomainClassifier.fit(table(data), 2, Streams(0), steps=10).probabilities(as_seen[0])
        for data in (stored, as_seen)
    ]
    assert torch.equal(*results)


def test_no_records_is_said_plainly() -> None:
    with pytest.raises(DataError, match="at least one record"):
        DomainClassifier.fit(table([torch.zeros(0, 1, 8, 8)]), 2, Streams(0))
