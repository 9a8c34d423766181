from __future__ import annotations

import math
from typing import Any

import pytest

from fedloom.runs.health import ailment

KEY = "spread/pixels/n10/group=a"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"train/vae/loss": 5.0}], None),
        ([{"train/vae/loss": math.nan}], "not finite"),
        ([{"train/vae/kl": math.inf}], "not finite"),
        ([{"train/vae/loss": 5.0}, {"train/vae/loss": 4999.0}], None),
        ([{"train/vae/loss": 5.0}, {"train/vae/loss": 5001.0}], "exploded"),
        ([{"train/gan/loss": 0.1}, {"train/gan/loss": 900.0}], None),
        ([{KEY: 0.01}], None),  # never diverse yet, and not the last round: it may still become so
        ([{KEY: 0.5}, {}, {KEY: 0.01}], "collapsed"),
        ([{}] * 11 + [{KEY: 0.01}], "collapsed"),
        ([{KEY: 0.5}, {KEY: math.nan}], "not finite"),
    ],
)
def test_it_is_diverged_exactly_when_it_should_be(rows: list[dict[str, Any]], reason: str | None) -> None:
    numbered = [{"round": number, **row} for number, row in enumerate(rows, start=1)]
    found = ailment(numbered, rounds=12)
    assert found is None if reason is None else reason in str(found)


def test_a_short_run_is_not_blamed_for_samples_that_never_became_diverse() -> None:
    assert ailment([{"round": 2, KEY: 0.01}], rounds=2) is None
