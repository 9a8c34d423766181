from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedloom.errors import DataError
from fedloom.federation.building import SiloSummary, describe, federation_from_arrays

GREY = np.arange(20, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 5), dtype=np.uint8)


def test_arrays_and_tensors_become_silos_in_the_given_order() -> None:
    federation = federation_from_arrays(
        {"west": (GREY, np.arange(20) % 2), "east": torch.from_numpy(GREY)[:10, None]},
        groups={"west": "mr", "east": "ct"},
    )
    assert federation.shape == (1, 4, 5)
    assert federation.groups == ("ct", "mr")
    assert [(silo.name, silo.groups) for silo in federation.silos] == [("west", (1,)), ("east", (0,))]
    assert [s.records for s in describe(federation)] == [18, 9]
    assert describe(federation)[1] == SiloSummary("east", ("ct",), 9, {"unlabelled": 9})
    values = torch.cat([federation.silos[0].train.x[:, 0, 0, 0], federation.test.x[:2, 0, 0, 0]])
    assert sorted(values.tolist()) == list(range(20))
    assert federation.silos[0].train.y.tolist() == (federation.silos[0].train.x[:, 0, 0, 0] % 2).tolist()


def test_given_held_out_examples_leave_the_silos_whole() -> None:
    federation = federation_from_arrays(
        {"a": (GREY, ["cat"] * 20), "b": (GREY, ["dog"] * 20)}, test={"b": (GREY[:3], ["cat", "dog", "eel"])}
    )
    assert [len(silo) for silo in federation.silos] == [20, 20]
    assert federation.classes == ("cat", "dog", "eel")
    assert federation.test.y.tolist() == [0, 1, 2]
    assert federation.groups == ("all",)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_become_float32_and_features_stay_flat(dtype: type[np.floating[Any]]) -> None:
    federation = federation_from_arrays({"a": GREY[:, 0].astype(dtype)})
    assert federation.shape == (5,)
    assert federation.silos[0].train.x.dtype == torch.float32


def test_the_federation_does_not_share_memory_with_the_array() -> None:
    mine = GREY.copy()
    federation = federation_from_arrays({"a": mine}, test={"a": mine})
    mine[:] = 255
    assert federation.silos[0].train.x[:, 0, 0, 0].tolist() == list(range(20))


NAN = np.where(GREY == 7, np.nan, GREY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"silos": {}}, "silos is empty"),
        ({"silos": {"a": GREY.astype(np.int64)}}, "silo 'a' holds int64 values; give uint8 images or floats"),
        ({"silos": {"a": GREY > 3}}, "silo 'a' holds bool values"),
        ({"silos": {"a": GREY[None, None]}}, r"silo 'a' has shape \(1, 1, 20, 4, 5\)"),
        ({"silos": {"a": GREY[:0]}}, r"silo 'a' has shape \(0, 4, 5\)"),
        ({"silos": {"a": NAN}}, "silo 'a' holds values that are not finite"),
        ({"silos": {"a": [[1.0], [1.0, 2.0]]}}, "silo 'a' cannot be read as one array"),
        ({"silos": {"a": torch.zeros(4, 2, dtype=torch.bfloat16)}}, "silo 'a' cannot be read as one array"),
        ({"silos": {"a": GREY, "b": GREY[:, 1:]}}, r"silo 'b' holds torch.uint8 of shape \(1, 3, 5\), but silo 'a'"),
        ({"silos": {"a": GREY, "b": GREY / 255}}, "silo 'b' holds torch.float32"),
        ({"silos": {"a": (GREY, [1, 2])}}, r"y of silo 'a' has shape \(2,\); give one value for each of the 20"),
        ({"silos": {"a": (GREY, [1.5] * 20)}}, "y of silo 'a' holds float64 values"),
        ({"silos": {"a": (GREY, [1] * 20), "b": (GREY, ["x"] * 20)}}, "whole numbers here and texts there"),
        ({"silos": {"a": GREY, "b": GREY}, "groups": {"a": "ct"}}, "no group for silo 'b'"),
        ({"silos": {"a": GREY}, "groups": {"a": "ct", "bb": "ct"}}, "groups: unknown silo 'bb'"),
        ({"silos": {"a": GREY}, "test": {"b": GREY}}, "test: unknown silo 'b'"),
        ({"silos": {"a": GREY}, "test": {"a": GREY[:, 1:]}}, "held-out examples of 'arrays' are"),
        ({"silos": {"server": GREY}}, "no silo may be called 'server'"),
        ({"silos": {"a": GREY[:1]}}, "too few examples to hold any out"),
    ],
)
def test_bad_arrays_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        federation_from_arrays(**arguments)
