import pytest

from fedloom.evaluation.keys import metric_key


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
