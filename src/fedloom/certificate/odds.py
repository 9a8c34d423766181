"""Epsilon and delta as people can weigh them: how sure somebody can become, and how rarely that does not hold."""

from __future__ import annotations

import math

ALMOST_NOTHING = 0.99  # an observer who can become surer than this is hardly held back


def certainty(epsilon: float, delta: float) -> float:
    """At most how sure somebody can become who was 50 % sure that a record is in the data.

    >>> round(certainty(1.0, 0.0), 4)
    0.7311
    """
    return min(1.0, (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon)))


def of_several(epsilon: float, delta: float, records: int) -> tuple[float, float]:
    """What so many records of one person together are protected by, where each alone is by epsilon and delta.

    From data with all of them to data without any is a step for each record, and each adds up with those before it.
    """
    return records * epsilon, min(1.0, delta * sum(math.exp(min(step * epsilon, 700.0)) for step in range(records)))


def percent(share: float) -> str:
    """A share with as many digits as it takes to tell it from 100 %.

    >>> percent(0.73106), percent(0.99995), percent(1.0)
    ('73.1 %', '99.995 %', '100 %')
    """
    told = next((f"{100 * share:.{digits}f}" for digits in range(1, 6) if round(100 * share, digits) < 100), "100")
    return f"{told} %"


def one_in(chance: float) -> str:
    """A small chance as people say it; rounded so that it is never told smaller than it is.

    >>> one_in(1e-05)
    '1 in 100,000'
    """
    return f"1 in {math.floor(1 / chance + 1e-9):,}"
