"""What cannot be learned from is refused in one sentence, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from downstream.gaussians import CLASSES, config, lopsided, records
from fedloom.downstream.stage import downstream
from fedloom.errors import FedloomError
from fedloom.experiment import train
from fedloom.federation.building import federation_from_arrays
from fedloom.federation.records import Federation, Records, Silo


def with_first(change: Callable[[Records], Records]) -> Federation:
    federation = lopsided()
    first = federation.silos[0]
    return replace(federation, silos=(replace(first, train=change(first.train)), *federation.silos[1:]))


def spoilt(table: Records) -> Records:
    x = table.x.clone()
    x[3, 2] = float("nan")
    return replace(table, x=x)


def one_class() -> Federation:
    silos = {name: (torch.rand(20, 4).numpy(), [7] * 20) for name in ("a", "b")}
    return federation_from_arrays(silos, test={"a": (torch.rand(5, 4).numpy(), [7] * 5)})


def spoilt_validation() -> Federation:
    first, *others = lopsided().silos
    assert first.validation is not None
    return replace(lopsided(), silos=(replace(first, validation=spoilt(first.validation)), *others))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: with_first(lambda table: replace(table, y=torch.where(table.y == 2, -1, table.y))),
            "'dp_cvae' learns classes, but 2 of the 60 records of silo 'silo-0' have no label",
        ),
        (one_class, "method 'dp_cvae' needs records of at least two classes, not 1"),
        (
            lambda: with_first(lambda table: replace(table, x=table.x[:, :5])),
            r"silo 'silo-1' holds records of shape \(6,\), the others \(5,\)",
        ),
        (
            lambda: federation_from_arrays({"a": torch.rand(20, 4).numpy(), "b": torch.rand(20, 5).numpy()}),
            "silo 'b' holds .*5.* but silo 'a' .*4",
        ),
        (lambda: with_first(spoilt), "silo 'silo-0' holds values that are not finite"),
        (spoilt_validation, "silo 'silo-0' holds values that are not finite"),
        (lambda: replace(lopsided(), test=spoilt(lopsided().test)), "held-out records hold values that are not finite"),
        (
            lambda: replace(lopsided(), test=replace(lopsided().test, x=lopsided().test.x[:, :3])),
            r"the held-out records have shape \(3,\), those of the silos \(6,\)",
        ),
    ],
)
def test_bad_records_are_one_sentence(make: Callable[[], Federation], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FedloomError, match=sentence) as caught:
        train(config("dp_cvae"), tmp_path / "run", make())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_classes_that_nobody_trains_on_are_named(tmp_path: Path) -> None:
    silos = tuple(Silo(f"silo-{i}", records(i, 20, 20, 0), records(9 + i, 8, 8, 0)) for i in range(2))
    data = Federation("gaussians", silos, records(99, 30, 30, 30), ("all",), CLASSES)
    found = downstream(train(config("moments"), tmp_path / "run", data), synthetic=300, federation=data)
    assert found["sentences"] == ["30 held-out records are of classes that no silo trains on: cat"]
    assert found["rows"]["centralised"]["global"]["accuracy"] <= 2 / 3
    assert found["rows"]["centralised"]["silo"]["accuracy"] > 0.8  # at a silo it does not occur
