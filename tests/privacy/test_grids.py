"""Discrete noise and grids: the stated distribution, no overflow, and the epsilon of continuous noise."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from discrete_noise import chances, surprise
from fedloom.errors import ConfigError, FedloomError
from fedloom.privacy import discrete_gaussian as sampler
from fedloom.privacy.accounting import Gaussian, spent
from fedloom.privacy.discrete_gaussian import discrete_gaussian
from fedloom.privacy.grids import FARTHEST, SMOOTH, Grid, SharedSum
from fedloom.privacy.noise import NoiseKey, SecureNoise, StreamNoise
from fedloom.privacy.trust import Distributed
from fedloom.streams import Streams

NOW = NoiseKey(0, 1, 0, "test")
SMALL = SharedSum(bits=20, trust=Distributed(5), units=500, bound=1.0, multiplier=1.0, size=10)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.5, 7.3])
def test_noise_has_exactly_its_distribution(sigma: float) -> None:
    """True numbers would fail once in a thousand million times; those rounded from a normal draw do fail."""
    drawn = discrete_gaussian(sigma, 400_000, SecureNoise().words(NOW))
    expected = chances(sigma, math.ceil(12 * sigma))
    assert surprise(drawn, expected) > 1e-9
    rounded = np.rint(np.random.default_rng(0).normal(0, sigma, 400_000)).astype(np.int64)
    assert sigma > 1.0 or surprise(rounded, expected) < 1e-9


@pytest.mark.parametrize("silos", [2, 5])
def test_the_noise_of_a_sum_is_that_of_one_draw_of_the_whole_variance(silos: int) -> None:
    """The third step of the argument, at the least noise that a silo adds; a silo that adds too little is found out."""
    source = SecureNoise().words(NOW)
    each = [discrete_gaussian(4.0, 200_000, source) for _ in range(silos)]
    whole = chances(4.0 * math.sqrt(silos), 150)
    assert surprise(np.sum(each, axis=0), whole) > 1e-9
    each[0] = discrete_gaussian(2.0, 200_000, source)
    assert surprise(np.sum(each, axis=0), whole) < 1e-9


def test_a_normal_number_rounded_at_random_is_a_discrete_one() -> None:
    """The second step: the chances of N(0, s^2 - r^2) rounded with weights exp(-d^2 / 2r^2) are the discrete ones."""
    sigma, smooth, fine = 5.0, SMOOTH, 1 / 256
    places = np.arange(-80, 80, fine)
    density = np.exp(-(places**2) / (2 * (sigma**2 - smooth**2)))
    density /= density.sum()
    numbers = np.arange(-60, 61)
    weights = np.exp(-((numbers[:, None] - places) ** 2) / (2 * smooth**2))
    found = (weights / np.exp(-((np.arange(-120, 121)[:, None] - places) ** 2) / (2 * smooth**2)).sum(axis=0)) @ density
    np.testing.assert_allclose(found, chances(sigma, 60), rtol=1e-9, atol=1e-16)
    assert 2 * math.exp(-2 * math.pi**2 * smooth**2) < 1e-33


def test_a_coin_that_64_bits_do_not_decide_is_decided_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every coin made doubtful, exact fractions alone give the same distribution."""
    for exponent in (Fraction(0), Fraction(1, 3), Fraction(1), Fraction(40, 7), Fraction(123, 2)):
        low, high = sampler._exponential(exponent, 72)
        assert 0 <= high - low < Fraction(1, 2**70)
        assert float(low) == pytest.approx(math.exp(-exponent), rel=1e-9, abs=1e-21)
    begun = int(math.exp(-1) * 2**64) - 2**20  # one bit pattern below the probability, and one above
    assert sampler._compared(begun, Fraction(1), SecureNoise().words(NOW))
    assert not sampler._compared(begun + 2**21, Fraction(1), SecureNoise().words(NOW))
    edge = math.floor(sampler._exponential(Fraction(1), 200)[0] * 2**64)
    words = StreamNoise(Streams(0)).words(NOW)
    told = [sampler._compared(edge, Fraction(1), words) for _ in range(2000)]
    behind = float(sampler._exponential(Fraction(1), 200)[0] * 2**64 - edge)  # the chance that is left to further bits
    assert abs(sum(told) - 2000 * behind) < 6 * math.sqrt(2000 * behind * (1 - behind))
    monkeypatch.setattr(sampler, "UNDECIDED", 1.0)
    assert surprise(discrete_gaussian(1.5, 4000, words), chances(1.5, 20)) > 1e-9


def test_noise_of_a_stream_is_the_same_again_and_that_of_the_system_never() -> None:
    stream, secure = StreamNoise(Streams(3)), SecureNoise()
    again = [discrete_gaussian(100.0, 50, stream.words(NOW)) for _ in range(2)]
    assert np.array_equal(*again)
    assert not np.array_equal(again[0], discrete_gaussian(100.0, 50, stream.words(replace(NOW, round=2))))
    assert not np.array_equal(again[0], discrete_gaussian(100.0, 50, stream.words(replace(NOW, use="other"))))
    assert not np.array_equal(*(discrete_gaussian(100.0, 50, secure.words(NOW)) for _ in range(2)))


@settings(max_examples=300, deadline=None)
@given(
    bits=st.integers(16, 52),
    silos=st.integers(2, 200),
    units=st.integers(1, 10**6),
    bound=st.floats(1e-6, 1e6),
    multiplier=st.floats(0.01, 1e3),
    size=st.integers(1, 10**7),
    data=st.data(),
)
def test_no_sum_can_overflow(bits, silos, units, bound, multiplier, size, data) -> None:  # type: ignore[no-untyped-def]
    """However the units are spread over the silos, the most that all can come to together is below half the ring."""
    shared = SharedSum(
        bits, Distributed(silos, data.draw(st.integers(0, silos - 2))), silos * units, bound, multiplier, size
    )
    try:
        grid = shared.grid()
    except ConfigError:
        return
    sizes = [silos * units - (silos - 1), *[1] * (silos - 1)] if data.draw(st.booleans()) else [units] * silos
    assert sum(grid.most(each) for each in sizes) < 2 ** (bits - 1)
    assert grid.effective >= multiplier * (1 - 1e-12)


def test_the_largest_sum_comes_back_whole() -> None:
    """Values at the edge of what is allowed, with the largest noise, are below what the ring was made for."""
    grid = SMALL.grid()
    edge = grid.integers(torch.full((10,), 100.0, dtype=torch.float64), 100, SecureNoise().words(NOW))
    assert (np.abs(edge) <= grid.most(100)).all()
    assert 5 * grid.most(100) < 2**19
    source, farther = StreamNoise(Streams(2)), torch.full((10,), 1e6, dtype=torch.float64)
    one, other = (grid.integers(total, 100, source.words(NOW)) for total in (farther, 2 * farther))
    assert np.array_equal(one, other)
    assert (one <= grid.most(100)).all()
    with pytest.raises(FedloomError, match="a sum is not a number"):
        grid.integers(torch.tensor([math.nan] * 10, dtype=torch.float64), 100, SecureNoise().words(NOW))


def test_rounding_favours_no_side_and_moves_by_less_than_one() -> None:
    grid = Grid(SMALL, 0, 2.0, 1e-9)  # next to no noise
    total = torch.tensor([0.25, -0.25, 3.0, -7.9], dtype=torch.float64).repeat(50_000)
    found = grid.integers(total, 100, SecureNoise().words(NOW)).reshape(-1, 4)
    assert (np.abs(found - total.numpy().reshape(-1, 4)) < 1).all()
    error = 6 * 0.5 / math.sqrt(50_000)
    assert np.abs(found.mean(axis=0) - total[:4].numpy()).max() < error
    # The same coins round neighbours alike: one unit moves no number by 1 more than it moves the sum.
    one, other = (grid.integers(total + d, 100, StreamNoise(Streams(1)).words(NOW)) for d in (0.0, 0.7))
    assert set((other - one).tolist()) <= {0, 1}


def test_at_20_bits_discrete_noise_costs_what_continuous_noise_does() -> None:
    """Of the same size: within 1 %, by the bound and by the discrete noise's own distribution."""
    grid = SMALL.grid()
    continuous = math.sqrt(4) * grid.sigma * 2.0**-grid.exponent / SMALL.bound
    charged, plain = (spent([Gaussian(noise)], 1e-5) for noise in (grid.effective, continuous))
    assert plain <= charged <= 1.01 * plain
    own = privacy_loss_distribution.from_discrete_gaussian_mechanism(
        sigma=2 * grid.sigma, sensitivity=math.ceil(grid.sensitivity), value_discretization_interval=1e-4
    )
    assert own.get_epsilon_for_delta(1e-5) == pytest.approx(charged, rel=0.01)


def test_the_bound_is_never_below_the_discrete_noise_itself() -> None:
    """Where steps are so coarse that the two differ: sigma 4 of one silo, one unit moving one number by 1 to 6."""
    for move, sigma in itertools.product((1, 3, 6), (4.0, 6.0)):
        own = privacy_loss_distribution.from_discrete_gaussian_mechanism(
            sigma=sigma, sensitivity=move, value_discretization_interval=1e-4
        ).get_epsilon_for_delta(1e-6)
        assert own <= spent([Gaussian(math.sqrt(sigma**2 - SMOOTH**2) / move)], 1e-6) * 1.001


def test_fewer_bits_take_more_noise_until_they_are_refused() -> None:
    losses = {bits: replace(SMALL, bits=bits).grid().loss for bits in (18, 20, 24, 32)}
    assert sorted(losses.values(), reverse=True) == list(losses.values())
    assert (losses[20] < 0.01, losses[32] < 1e-5) == (True, True)
    with pytest.raises(ConfigError, match=r"privacy.bits = 16 leaves noise that is larger by \d+% for a sum of 10 num"):
        replace(SMALL, bits=16, size=10).grid()
    with pytest.raises(ConfigError, match=r"privacy\.bits = 16 leaves no grid at all"):
        replace(SMALL, bits=16, size=10**7).grid()


def test_no_draw_is_farther_than_the_ring_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert math.erfc(FARTHEST / math.sqrt(2)) < 1e-37
    monkeypatch.setattr(sampler, "FARTHEST", 1.0)
    assert np.abs(discrete_gaussian(10.0, 5000, SecureNoise().words(NOW))).max() == 10
