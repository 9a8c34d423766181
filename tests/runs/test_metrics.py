import pytest

from fedloom.runs.metrics import is_metric, metric_key, of_whom, sample_count, split_key, uncounted

HIT = "domain-hit/domain-cnn/n10/group=a"


@pytest.mark.parametrize(
    ("group", "silo", "key"),
    [
        (None, None, "kid/pixels/n500"),
        ("mnist", None, "kid/pixels/n500/group=mnist"),
        (None, "hospital-3", "kid/pixels/n500/silo=hospital-3"),
    ],
)
def test_a_key_says_what_was_computed(group: str | None, silo: str | None, key: str) -> None:
    assert metric_key("kid", "pixels", 500, group=group, silo=silo) == key


def test_a_metric_has_one_owner() -> None:
    with pytest.raises(ValueError, match="not to both"):
        metric_key("kid", "pixels", 500, group="a", silo="b")


@pytest.mark.parametrize(
    ("key", "without", "count"),
    [
        ("blend/domain-cnn/n1000/group=mnist", "blend/domain-cnn/group=mnist", 1000),
        ("frechet/pixels/n20", "frechet/pixels", 20),
        ("train/nll", "train/nll", None),
        ("probe/accuracy/group=n5", "probe/accuracy/group=n5", None),
    ],
)
def test_a_key_tells_its_number_of_samples(key: str, without: str, count: int | None) -> None:
    assert (uncounted(key), sample_count(key)) == (without, count)


def test_keys() -> None:
    assert [is_metric(key) for key in ("round", "train/vae/loss", HIT)] == [False, False, True]
    assert split_key(HIT) == ("domain-hit/domain-cnn/n10", "a")
    assert split_key("cost/seconds/n2") == ("cost/seconds/n2", "")
    assert split_key("elbo/nats/n2/silo=x/group=y") == ("elbo/nats/n2", "x/group=y")
    assert [of_whom(key) for key in (HIT, "kl/nats/n2/silo=x/group=y", "kl/nats/n2")] == [
        "group a",
        "silo x/group=y",
        "all",
    ]
