"""Epsilon and delta in words, computed by hand."""

from __future__ import annotations

import math

import pytest

from fedloom.certificate.odds import certainty, of_several, one_in, percent


@pytest.mark.parametrize(
    ("epsilon", "delta", "told"),
    [
        (0.0, 0.0, "50.0 %"),  # 1 / 2
        (1.0, 0.0, "73.1 %"),  # 2.71828 / 3.71828
        (3.0, 0.0, "95.3 %"),  # 20.0855 / 21.0855
        (0.0, 0.2, "60.0 %"),  # 1.2 / 2
        (math.log(4), 0.5, "90.0 %"),  # 4.5 / 5
        (10.0, 1e-5, "99.995 %"),  # 22026.5 / 22027.5
        (800.0, 0.0, "100 %"),
        (math.inf, 0.0, "100 %"),
    ],
)
def test_how_sure_an_observer_can_become(epsilon: float, delta: float, told: str) -> None:
    assert percent(certainty(epsilon, delta)) == told


def test_a_person_with_several_records_is_protected_less() -> None:
    """Two steps: from data with both records to one (epsilon, delta), from there to none, which e^epsilon magnifies."""
    assert of_several(math.log(2), 0.01, 2) == pytest.approx((math.log(4), 0.01 + 2 * 0.01))
    assert of_several(1.0, 1e-5, 1) == (1.0, 1e-5)
    assert of_several(3.0, 1e-3, 10) == (30.0, 1.0)


@pytest.mark.parametrize(
    ("chance", "told"), [(1e-5, "1 in 100,000"), (0.001, "1 in 1,000"), (3e-5, "1 in 33,333"), (0.3, "1 in 3")]
)
def test_a_chance_is_never_told_smaller_than_it_is(chance: float, told: str) -> None:
    assert one_in(chance) == told
    assert 1 / int(told.removeprefix("1 in ").replace(",", "")) >= chance * (1 - 1e-9)
