from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.config import ParticipationConfig
from fedloom.federation.participation import participants
from fedloom.streams import Streams


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_bernoulli_takes_each_silo_at_its_rate(rate: float) -> None:
    config = ParticipationConfig(mode="bernoulli", rate=rate)
    rounds = [participants(config, 20, number, Streams(3)) for number in range(500)]
    # 10,000 coins: four standard deviations are at most 0.02; one silo's 500 coins, at most 0.09.
    assert sum(map(len, rounds)) / 10_000 == pytest.approx(rate, abs=0.02)
    for silo in range(20):
        assert sum(silo in taken for taken in rounds) / 500 == pytest.approx(rate, abs=0.09)


def test_bernoulli_may_take_nobody() -> None:
    config = ParticipationConfig(mode="bernoulli", rate=0.1)
    assert () in [participants(config, 3, number, Streams(0)) for number in range(50)]


@pytest.mark.parametrize(
    ("rate", "silos", "count"), [(0.5, 10, 5), (0.25, 10, 3), (0.01, 10, 1), (1.0, 7, 7), (0.34, 3, 1)]
)
def test_fixed_takes_the_nearest_share_and_at_least_one(rate: float, silos: int, count: int) -> None:
    config = ParticipationConfig(mode="fixed", rate=rate)
    assert {len(participants(config, silos, number, Streams(1))) for number in range(20)} == {count}


@given(mode=st.sampled_from(["bernoulli", "fixed"]), silos=st.integers(1, 40), number=st.integers(0, 10**6))
def test_the_draw_is_sorted_in_range_and_a_pure_function(mode: str, silos: int, number: int) -> None:
    config = ParticipationConfig(mode=mode, rate=0.4)  # type: ignore[arg-type]
    taken = participants(config, silos, number, Streams(5))
    assert list(taken) == sorted(set(taken))
    assert set(taken) <= set(range(silos))
    assert taken == participants(config, silos, number, Streams(5))


@pytest.mark.parametrize("mode", ["bernoulli", "fixed"])
def test_rounds_and_seeds_differ_and_rate_one_takes_all(mode: str) -> None:
    half = ParticipationConfig(mode=mode, rate=0.5)  # type: ignore[arg-type]
    draws = {participants(half, 30, number, Streams(seed)) for number in range(5) for seed in range(5)}
    assert len(draws) == 25
    everyone = ParticipationConfig(mode=mode, rate=1.0)  # type: ignore[arg-type]
    assert participants(everyone, 4, 9, Streams(0)) == (0, 1, 2, 3)
