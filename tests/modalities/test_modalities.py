"""What images and vectors are, where that is decided, and what is said where it does not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom.errors import ConfigError, DataError
from fedloom.federation.building import federation_from_arrays
from fedloom.federation.records import Federation, Records, Silo, concatenate
from fedloom.methods.base import Setting, make_method
from fedloom.modalities.base import MODALITIES, modality_of
from support import federation_of, tiny_config


def images(count: int) -> Records:
    zeros = torch.zeros(count, dtype=torch.int64)
    return Records(torch.arange(count * 6, dtype=torch.uint8).reshape(count, 1, 2, 3), zeros, zeros)


@pytest.mark.parametrize(
    ("shape", "name"), [((6,), "vector"), ((28, 28), "image"), ((1, 28, 28), "image"), ((5, 2, 2), "image")]
)
def test_records_that_name_no_modality_are_known_by_their_shape(shape: tuple[int, ...], name: str) -> None:
    assert modality_of("", shape) is MODALITIES[name]
    assert modality_of("vector", shape) is MODALITIES["vector"]


def test_pixels_stand_for_x_over_255_and_back() -> None:
    records = images(4)
    assert torch.equal(records.values, records.x / 255.0)
    assert torch.equal(records.modality.decode(records.values), records.values)
    assert np.array_equal(records.modality.encode(records.values), records.x.numpy())


def test_a_table_keeps_its_kind_whatever_is_taken_of_it() -> None:
    records = replace(images(4), kind="vector")
    for table in (records.take(torch.tensor([1, 2])), records.of_group(0), records.to("cpu")):
        assert table.modality is MODALITIES["vector"]


def test_tables_of_different_modality_do_not_become_one() -> None:
    plain, named = images(2), replace(images(3), kind="image")
    assert len(concatenate([plain, named])) == 5
    with pytest.raises(DataError, match=r"^images and vectors do not go into one table$"):
        concatenate([plain, named, replace(plain, kind="vector")])


def test_silos_of_different_modality_are_refused_in_one_sentence() -> None:
    (first,) = federation_of([0] * 5).silos
    other = Silo("clinic", images(5))
    with pytest.raises(DataError, match=r"^silo 'clinic' holds images, the others vectors$"):
        Federation("mixed", (first, other), first.train, ("a",))
    with pytest.raises(DataError, match=r"^the held-out records are images, those of the silos vectors$"):
        Federation("mixed", (first,), other.train, ("a",))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ("method.name=dp_cvae",),
            r"method 'dp_cvae' needs vectors, but the records have shape \(1, 2, 3\) and are images; see",
        ),
        (
            ("model.likelihood=bernouli",),
            r"model.likelihood: unknown likelihood 'bernouli'; did you mean 'bernoulli'\?",
        ),
        (
            ('model.silos={a={likelihood="poisson"}}',),
            r"model.silos.a.likelihood: unknown likelihood 'poisson' \(allowed: bernoulli, gaussian\)",
        ),
    ],
)
def test_what_does_not_fit_the_records_is_named(overrides: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^{complaint}"):
        make_method(Setting(tiny_config(*overrides), (1, 2, 3), ("all",), ("x", "y"), ("a",)))


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_images_go_into_columns_and_come_back(channels: int) -> None:
    modality, x = MODALITIES["image"], torch.rand(4, channels, 5, 6)
    columns, shape = modality.columns(x), (channels, 5, 6)
    assert list(columns) == ["values" if channels == 2 else "image"] == list(modality.schema(shape)["columns"])
    back = modality.decode(modality.read(modality.restored(columns, shape), "columns"))
    torch.testing.assert_close(back, x, rtol=0, atol=0.0 if channels == 2 else 0.5 / 255 + 1e-6)
    with pytest.raises(DataError, match=r"^images have the columns (image|values), not age$"):
        modality.restored({"age": np.zeros(4)}, shape)


def test_arrays_of_another_modality_than_they_say_are_refused() -> None:
    with pytest.raises(DataError, match=r"^silo 'a' has shape \(20, 6\); give images of shape \(n, height, width\)"):
        federation_from_arrays({"a": np.zeros((20, 6))}, modality="image")


def test_a_modality_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^unknown modality 'images'; did you mean 'image'\? \(allowed: frequencies, image, tab"
    ):
        modality_of("images", (1, 2, 3))
