"""Groups are found where there are some, in stable order, and one where there are none."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.discovery.clustering import LEVEL, find_groups

NOISE = 0.05


def silos(centres: list[float], each: int, *, seed: int, noise: float = NOISE) -> tuple[np.ndarray, np.ndarray]:
    """So many silos around each of these places on a diagonal of 32 numbers, in turn."""
    places = np.array([centres[number % len(centres)] for number in range(each * len(centres))])
    exact = places[:, None] * np.ones(32) / np.sqrt(32)
    return exact + np.random.default_rng(seed).normal(size=exact.shape) * noise, np.full(len(places), noise**2)


def test_the_number_of_groups_is_found_and_they_are_numbered_by_their_first_silo() -> None:
    points, variances = silos([0.0, 4.0, 9.0], 4, seed=1)
    found = find_groups(points, variances, most=6)
    assert found.labels == (0, 1, 2) * 4
    assert found.directions == 1  # all lie on one line
    assert found.chance <= LEVEL
    turned = find_groups(points[::-1], variances, most=6)
    assert turned.labels == (0, 1, 2) * 4  # the last group is met first now


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_has_no_direction_and_one_group(seed: int) -> None:
    found = find_groups(*silos([0.0], 12, seed=seed), most=6)
    assert (found.directions, found.labels) == (0, (0,) * 12)


def test_silos_that_differ_without_gaps_are_one_group() -> None:
    points, variances = silos(list(np.linspace(0.0, 4.0, 12)), 1, seed=3)
    found = find_groups(points, variances, most=6)
    assert found.directions == 1  # they do differ
    assert set(found.labels) == {0}
    assert found.chance > LEVEL


def test_what_is_called_noise_hides_the_groups() -> None:
    """The very same points are one group where their noise is known to be as large as their differences."""
    points, variances = silos([0.0, 4.0], 6, seed=2)
    assert find_groups(points, variances, most=6).labels == (0, 1) * 6
    assert set(find_groups(points, np.full(12, 4.0), most=6).labels) == {0}


def test_a_number_that_is_asked_for_is_made_whatever_the_criterion_says() -> None:
    assert max(find_groups(*silos([0.0, 4.0], 6, seed=2), most=6, groups=3).labels) == 2
    assert max(find_groups(*silos([0.0], 12, seed=2), most=6, groups=4).labels) == 3


def test_odds_are_those_of_equally_wide_normal_spreads() -> None:
    """Between two groups they are even, and as far as a group is from the middle they follow the normal density."""
    points, variances = silos([0.0, 2.0], 6, seed=4, noise=0.4)
    found = find_groups(points, variances, most=4, groups=2)
    member = np.array(found.labels)
    kept = (points - points.mean(axis=0)) @ np.linalg.svd(points - points.mean(axis=0))[2][: found.directions].T
    centres = np.stack([kept[member == group].mean(axis=0) for group in (0, 1)])
    spread = ((kept - centres[member]) ** 2).sum() / (10 * found.directions)
    distance = ((kept[:, None] - centres) ** 2).sum(axis=2)
    weight = np.exp(-distance / (2 * max(spread, 0.16)))
    assert np.allclose(found.odds, weight / weight.sum(axis=1, keepdims=True))
    assert np.allclose(found.odds.sum(axis=1), 1.0)
