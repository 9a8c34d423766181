from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.stats import binom, chisquare
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.privacy.noise import NoiseKey, SecureNoise, StreamNoise
from fedloom.privacy.sampling import capacity, passes, poisson_sample, sampling_rate, subject_passes
from fedloom.streams import Streams

UNITS, RATE = 60, 0.2


def sizes_look_binomial(batches: list[Tensor]) -> bool:
    """A chi-square test of batch sizes against Binomial(n, q), in bins that expect at least five."""
    sizes = torch.tensor([len(batch) for batch in batches])
    edges = [-1, *range(6, 19), UNITS]
    found = [int(((sizes > low) & (sizes <= high)).sum()) for low, high in itertools.pairwise(edges)]
    weights = [binom.cdf(high, UNITS, RATE) - binom.cdf(low, UNITS, RATE) for low, high in itertools.pairwise(edges)]
    return bool(chisquare(found, [len(batches) * weight for weight in weights]).pvalue > 1e-9)


def test_batches_are_poisson_samples() -> None:
    streams = StreamNoise(Streams(1))
    batches = [poisson_sample(streams, UNITS, RATE, NoiseKey(0, 1, step)) for step in range(2000)]
    assert sizes_look_binomial(batches)
    often = torch.stack([torch.bincount(batch, minlength=UNITS) for batch in batches]).double().mean(0)
    assert ((often - RATE).abs() < 5 * (RATE * (1 - RATE) / 2000) ** 0.5).all(), "every record has the same chance"
    secure = [poisson_sample(SecureNoise(), UNITS, RATE, NoiseKey(0, 1, step)) for step in range(2000)]
    assert sizes_look_binomial(secure)


def test_shuffled_batches_are_found_out() -> None:
    shuffled = [part for i in range(400) for part in torch.split(Streams(i).permutation("batches", UNITS), 12)]
    assert not sizes_look_binomial(shuffled)


def test_samples_are_a_function_of_the_moment() -> None:
    streams = StreamNoise(Streams(1))
    one = poisson_sample(streams, 500, 0.5, NoiseKey(3, 2, 7))
    assert torch.equal(one, poisson_sample(streams, 500, 0.5, NoiseKey(3, 2, 7)))
    assert not torch.equal(one, poisson_sample(streams, 500, 0.5, NoiseKey(3, 2, 8)))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 40])
def test_no_record_is_cut_off(count: int) -> None:
    chosen = torch.randperm(100)[:count]
    parts = passes(chosen, 8)
    assert len(parts) == max(1, -(-count // 8))
    assert all(part.index.shape == part.mask.shape == (8,) for part in parts)
    assert [len(part.index) for part in passes(chosen, 64)] == [8 * max(1, -(-count // 8))]
    assert torch.equal(torch.cat([part.index[part.mask > 0] for part in parts]), chosen)


def test_one_pass_is_nearly_always_enough() -> None:
    for units, rate in ((1600, 0.02), (1600, 0.16), (50, 0.5), (10, 1.0)):
        rows = capacity(torch.ones(units, dtype=torch.int64), rate)
        assert rows <= units
        assert binom.sf(rows, units, rate) < 1e-4


def test_a_pass_has_room_for_subjects_of_several_records() -> None:
    """50 subjects of 6 records: 24 are expected at rate 0.08, with a deviation of 11.5."""
    sizes = torch.full((50,), 6)
    assert capacity(sizes, 0.08) == 8 * math.ceil((24 + 4 * 6 * math.sqrt(50 * 0.08 * 0.92)) / 8)
    assert capacity(torch.tensor([40, 1, 1]), 0.01) == 40, "the largest subject in whole eights"
    assert capacity(torch.tensor([38, 1, 1]), 0.01) == 40
    assert capacity(torch.tensor([38, 1]), 0.01) == 39, "no more than there are records"


def test_the_records_of_a_subject_stay_together() -> None:
    subject = torch.tensor([0, 1, 0, 2, 2, 2, 2, 2, 3, 1])
    parts = subject_passes(torch.tensor([0, 2, 3, 1]), subject, 5)
    real = [part.index[part.mask > 0].tolist() for part in parts]
    assert real == [[0, 2], [3, 4, 5, 6, 7], [8, 1, 9]]
    assert {len(part.index) for part in parts} == {8}
    assert [part.mask.sum().item() for part in subject_passes(torch.tensor([], dtype=torch.int64), subject, 4)] == [0]


def test_a_batch_larger_than_the_silo_is_refused() -> None:
    assert sampling_rate(8, 40, "north") == 0.2
    with pytest.raises(ConfigError, match=r"local\.batch_size is 64, but silo 'north' holds 40"):
        sampling_rate(64, 40, "north")
