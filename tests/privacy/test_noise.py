from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import kstest

from fedloom.errors import ConfigError
from fedloom.privacy.noise import Moment, Randomness, SecureNoise, StreamNoise, deployment_noise
from fedloom.streams import Streams

SOURCES: dict[str, Randomness] = {
    "streams": StreamNoise(Streams(4)),
    "secure": SecureNoise(),
}
NOW = Moment(silo=2, round=3, step=5)


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


@pytest.mark.parametrize("name", SOURCES)
def test_only_seeded_sources_repeat_themselves_and_only_in_the_same_moment(name: str) -> None:
    source = SOURCES[name]
    assert source.repeatable == (name != "secure")
    for draw in (lambda moment: source.normal(50, moment), lambda moment: source.uniform(50, moment)):
        assert torch.equal(draw(NOW), draw(Moment(2, 3, 5))) == source.repeatable
        for other in (Moment(1, 3, 5), Moment(2, 4, 5), Moment(2, 3, 6)):
            assert not torch.equal(draw(NOW), draw(other))


def test_every_bit_of_a_moments_seed_changes_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's CPU generator heeds only 32 of them, so among 100,000 steps two would share their noise."""
    drawn = set()
    for bit in range(128):
        digest = (1 << bit).to_bytes(32, "little")
        monkeypatch.setattr(Streams, "digest", lambda self, purpose, digest=digest: digest)
        drawn.add(tuple(StreamNoise(Streams(4)).normal(4, NOW).tolist()))
    assert len(drawn) == 128


def test_secure_noise_is_float64() -> None:
    assert SecureNoise().normal(3, NOW).dtype == torch.float64


def test_a_deployment_takes_neither_a_seed_nor_a_gpus_generator() -> None:
    assert deployment_noise(None) == SecureNoise()
    with pytest.raises(ConfigError, match="the noise seed is 7, but a deployment draws its noise from the operating"):
        deployment_noise(7)
    with pytest.raises(ConfigError, match="the noise device is 'cuda'"):
        deployment_noise(None, "cuda")
