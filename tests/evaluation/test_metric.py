"""A metric as a value: what people read of it, and which way it is better."""

from __future__ import annotations

import pytest

from fedloom.evaluation.metric import METRICS, best, count_of, described, metric_title


@pytest.mark.parametrize(
    ("key", "values", "winner"),
    [
        ("frechet/pixels/n10", [3.0, None, 2.0], 2.0),
        ("precision/pixels-k5/n10/group=a", [0.3, 0.4], 0.4),
        ("cost/seconds/n10", [1.0, 2.0], None),
        ("elbo/nats/n10", [-90.0, -80.0], -80.0),
        ("frechet/pixels/n10", [2.0, 2.0], None),
        ("frechet/pixels/n10", [2.0, float("nan"), 5.0], 2.0),
        ("domain-hit/domain-cnn-z1-prior-of-b/n10/group=a", [0.1, 0.2], None),
    ],
)
def test_which_way_is_better(key: str, values: list[float | None], winner: float | None) -> None:
    assert best(key, values) == winner


@pytest.mark.parametrize(
    ("key", "title", "count"),
    [
        ("frechet/pixels/n1000/group=a", "Frechet distance (pixels)", "1,000 samples"),
        ("frechet/paper-pixels/n200", "Frechet distance by ALIGN-FL's protocol (pixels)", "200 samples"),
        ("frechet/timm/resnet18-224/n9", "Frechet distance (timm/resnet18-224)", "9 samples"),
        ("elbo/nats/n5/silo=x", "ELBO in nats", "5 records"),
        ("cost/bytes-up/n3", "Bytes that left the silos", "3 rounds"),
        ("cost/steps/n1", "Local steps", "1 round"),
        (
            "prior-attack-error/encoder-5-images/n100",
            "Error of priors guessed from a few images (encoder-5-images)",
            "100 attempts",
        ),
        (
            "domain-hit/domain-cnn-z1-prior-of-b/n7/group=a",
            "Samples from another group's prior in their own group (domain-cnn-z1, b)",
            "7 samples",
        ),
        ("unheard/of/n4/group=a", "unheard/of", "4"),
        ("privacy/epsilon/max", "privacy/epsilon/max", ""),
    ],
)
def test_what_people_read(key: str, title: str, count: str) -> None:
    assert (metric_title(key), count_of(key)) == (title, count)


def test_all_that_a_key_says() -> None:
    assert described("spread/pixels/n20/group=a") == ("Spread of samples (pixels), group a, 20 samples")
    assert described("cost/steps/n2") == "Local steps, 2 rounds"


def test_every_metric_says_what_it_is_and_what_its_numbers_are_called() -> None:
    for name, metric in METRICS.listed():
        assert name == metric.name
        assert metric.summary
        assert metric.readings
        assert all(reading.title for reading in metric.readings)
