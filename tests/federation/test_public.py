"""Which records everybody has: by source, by what a person says, outliers among them."""

from __future__ import annotations

import pytest

from fedloom.config import DataConfig, OutliersConfig
from fedloom.federation.sources import SOURCES, is_public

MNIST = {"mnist-sample", "fashion-mnist-sample", "mnist", "fashion-mnist"}
PUBLIC = MNIST | {
    "mixed-mnist-sample",
    "mixed-mnist",
    "mnist-frequencies",
    "fashion-frequencies",
    "adult-sample",
    "images",
}


def test_the_samples_and_what_the_package_downloads_are_public_and_what_people_bring_is_not() -> None:
    assert {name for name in SOURCES.own if is_public(DataConfig(source=name))} == PUBLIC


@pytest.mark.parametrize(
    ("config", "public"),
    [
        (DataConfig(source="npz", path="own.npz"), False),
        (DataConfig(source="npz", path="own.npz", public=True), True),
        (DataConfig(source="images", path="own"), False),
        (DataConfig(outliers=OutliersConfig(source="fashion-mnist-sample")), True),
        (DataConfig(outliers=OutliersConfig(source="npz", path="own.npz")), False),
        (DataConfig(source="npz", outliers=OutliersConfig(source="mnist-sample")), False),
        (DataConfig(outliers=OutliersConfig(source="npz", path="own.npz"), public=True), True),
        (DataConfig(source="a-plugin-that-is-gone"), False),
    ],
)
def test_records_are_public_where_all_of_them_are(config: DataConfig, public: bool) -> None:
    assert is_public(config) == public
