from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy.stats import binom, kstest, norm
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.privacy.noise import NoiseKey, Randomness, SecureNoise, StreamNoise, deployment_noise, keyed
from fedloom.streams import Streams

SECRET = bytes(range(32))
SOURCES: dict[str, Randomness] = {
    "streams": StreamNoise(Streams(4)),
    "keyed": keyed(SECRET, "a query"),
    "secure": SecureNoise(),
}
NOW = NoiseKey(silo=2, round=3, step=5)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_noise_is_standard_normal_and_coins_are_uniform(source: Randomness) -> None:
    """True numbers would fail once in a thousand million times."""
    numbers, coins = source.normal(200_001, NOW).double(), source.uniform(100_000, NOW)
    assert len(numbers) == 200_001
    assert kstest(numbers.numpy(), "norm").pvalue > 1e-9
    assert abs(float(numbers.mean())) < 7 / math.sqrt(200_000)
    assert float(numbers.var()) == pytest.approx(1, abs=7 * math.sqrt(2 / 200_000))
    assert abs(float((numbers[:-1] * numbers[1:]).mean())) < 7 / math.sqrt(200_000)
    assert kstest(coins.numpy(), "uniform").pvalue > 1e-9
    assert coins.dtype == torch.float64


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_noise_has_its_tails_and_both_halves_of_box_and_muller_are_independent(source: Randomness) -> None:
    """What the mean and the variance do not see: a tail that is cut, and a number that comes twice."""
    count = 2_000_000
    numbers = source.normal(count, NOW).double()
    for beyond in (2.0, 3.0, 4.0, 4.5):
        found = int((numbers.abs() > beyond).sum())
        low, high = binom.interval(1 - 1e-10, count, 2 * norm.sf(beyond))
        assert low <= found <= high, beyond
    one, other = numbers[: count // 2], numbers[count // 2 :]
    for power in (1, 2):
        correlation = torch.corrcoef(torch.stack((one**power, other**power)))[0, 1]
        assert abs(float(correlation)) < 7 / math.sqrt(count // 2)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_step_has_coins_of_its_own(source: Randomness) -> None:
    steps = torch.tensor([4, 5, 9])
    coins = source.coins(50_000, 2, 3, steps)
    assert (coins.shape, coins.dtype) == ((3, 50_000), torch.float64)
    assert (torch.corrcoef(coins) - torch.eye(3)).abs().max() < 7 / math.sqrt(50_000)
    assert all(kstest(row.numpy(), "uniform").pvalue > 1e-9 for row in coins)
    if source.repeatable:
        assert all(
            torch.equal(row, source.uniform(50_000, NoiseKey(2, 3, int(n))))
            for n, row in zip(steps, coins, strict=True)
        )


@pytest.mark.parametrize("name", SOURCES)
def test_only_seeded_sources_repeat_themselves_and_only_in_the_same_moment(name: str) -> None:
    source = SOURCES[name]
    assert source.repeatable == (name != "secure")
    steps = torch.arange(2)
    draws: tuple[Callable[[NoiseKey], Tensor], ...] = (
        lambda noise_key: source.normal(50, noise_key),
        lambda noise_key: source.uniform(50, noise_key),
        lambda noise_key: source.coins(9, noise_key.silo, noise_key.round, noise_key.step + steps),
        lambda noise_key: source.examples("latents", 3, 4, noise_key.silo, noise_key.round, noise_key.step + steps),
    )
    for draw in draws:
        assert torch.equal(draw(NOW), draw(NoiseKey(2, 3, 5))) == source.repeatable
        for other in (NoiseKey(1, 3, 5), NoiseKey(2, 4, 5), NoiseKey(2, 3, 6)):
            assert not torch.equal(draw(NOW), draw(other))
    for draw in draws[:2]:  # which have uses beside steps
        assert not torch.equal(draw(NOW), draw(NoiseKey(2, 3, 5, "moments")))


def test_every_bit_of_a_moments_seed_changes_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's CPU generator heeds only 32 of them, so among 100,000 steps two would share their noise."""
    drawn = set()
    for bit in range(128):
        digest = (1 << bit).to_bytes(32, "little")
        monkeypatch.setattr(Streams, "digest", lambda self, purpose, digest=digest: digest)
        drawn.add(tuple(StreamNoise(Streams(4)).normal(4, NOW).tolist()))
    assert len(drawn) == 128


def test_a_key_is_made_of_the_secret_and_of_every_letter_of_the_query() -> None:
    """The same query has the same noise; no two queries, and no two secrets, share any."""
    assert keyed(SECRET, "a query") == SOURCES["keyed"]
    others = [keyed(SECRET, "a querz"), keyed(SECRET, "a query "), keyed(bytes(32), "a query"), keyed(SECRET, "")]
    drawn = [source.normal(20, NOW) for source in (SOURCES["keyed"], *others)]
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 5
    assert all(source.streams.seed.bit_length() > 200 for source in others), "no seed that can be tried"


def test_examples_are_standard_normal_and_a_row_does_not_depend_on_their_number() -> None:
    for source in SOURCES.values():
        found = source.examples("latents", 500, 20, 1, 2, torch.arange(20))
        assert (found.shape, found.dtype) == ((20, 500, 20), torch.float32)
        assert kstest(found.flatten().numpy(), "norm").pvalue > 1e-9
    few, many = (SOURCES["keyed"].examples("latents", rows, 20, 1, 2, torch.arange(3)) for rows in (5, 9))
    assert torch.equal(many[:, :5], few)


def test_secure_noise_is_float64() -> None:
    assert SecureNoise().normal(3, NOW).dtype == torch.float64


def test_a_deployment_takes_neither_a_seed_nor_a_gpus_generator() -> None:
    assert deployment_noise(None) == SecureNoise()
    with pytest.raises(ConfigError, match="the noise seed is 7, but a deployment draws its noise from the operating"):
        deployment_noise(7)
    with pytest.raises(ConfigError, match="the noise seed is 0, but"):
        deployment_noise(0)
    with pytest.raises(ConfigError, match="the noise device is 'cuda'"):
        deployment_noise(None, "cuda")
