"""Whoever prints or logs a value that holds records sees shapes and counts, and no number of a record."""

from __future__ import annotations

import importlib
import pkgutil
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import fedloom
from fedloom.engines.base import Result, Task
from fedloom.evaluation.classification import Head
from fedloom.federation.arrays import Examples
from fedloom.federation.records import Batch, Canaries, Dataset, Records, Silo, batch_of
from fedloom.outline import in_outline
from fedloom.sharing.update import Update
from support import federation_of

SECRET = 0.1234  # which tensors and arrays both print whole
ARRAYS = re.compile(r"\bTensor\b|\bndarray\b|\bNDArray\b|\bTensors\b")


def dataclasses_of_the_package() -> Iterator[type]:
    for info in pkgutil.walk_packages(fedloom.__path__, "fedloom."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        yield from (
            found
            for found in vars(module).values()
            if isinstance(found, type) and found.__module__ == info.name and is_dataclass(found)
        )


def hints_of(found: type) -> dict[str, str]:
    try:
        return {name: str(hint) for name, hint in typing.get_type_hints(found).items()}
    except NameError:  # of an import for type checking alone: the text as it stands
        return {each.name: str(each.type) for each in fields(found)}


def holds_arrays(found: type) -> bool:
    return any("Callable" not in hint and ARRAYS.search(hint) for hint in hints_of(found).values())


CLASSES = [found for found in dataclasses_of_the_package() if holds_arrays(found)]


def filled(found: type) -> Any:
    """An instance whose every field is, or holds, an array of the secret."""
    value = object.__new__(found)
    tensor, array = torch.full((2, 3), SECRET), np.full((2, 3), SECRET)
    for each, hint in ((each, hints_of(found)[each.name]) for each in fields(found)):
        if "apping" in hint or "dict" in hint:
            content: Any = {"key": {"inner": tensor}, "other": array}
        elif "tuple" in hint or "Sequence" in hint or "list" in hint:
            content = [tensor, array]
        else:
            content = array if "ndarray" in hint else tensor
        object.__setattr__(value, each.name, content)
    return value


@pytest.mark.parametrize("found", CLASSES, ids=lambda found: f"{found.__module__}.{found.__name__}")
def test_a_class_that_holds_arrays_shows_none_of_their_numbers(found: type) -> None:
    assert "1234" not in repr(filled(found))


def test_there_are_classes_to_look_at() -> None:
    assert {Records, Batch, Dataset, Canaries, Examples, Update, Task, Head} <= set(CLASSES)
    assert len(CLASSES) > 50


def test_a_class_that_does_not_hide_them_would_be_found() -> None:
    @dataclass
    class Open:
        x: Tensor
        y: NDArray[Any]

    assert holds_arrays(Open)
    assert "1234" in repr(filled(Open))


def test_a_federation_is_printed_by_names_and_counts() -> None:
    federation = federation_of([0, 0, 0], [1, 1])
    assert str(federation.silos[0]) == (
        "Silo(name='silo-0', train=Records(x=float32 (3, 6), y=int64 (3,), group=int64 (3,), subject=None, "
        "attributes=None, home=None, kind=''), validation=None, named=True)"
    )
    assert repr(federation).startswith("Federation(name='tiny', silos=2 x Silo, test=Records(x=float32 (3, 6), ")
    assert "groups=2 x str, classes=none" in repr(federation)
    assert str(federation).splitlines() == [
        "tiny: 2 silos",
        "5 vectors of shape 6, 3 held out",
        "groups: a, b; 0 classes",
        "silo    records  groups  labels",
        "silo-0  3        a       0",
        "silo-1  2        b       0",
    ]


@pytest.mark.parametrize("kind", [Silo, Result])
def test_what_holds_such_a_value_is_shown_by_it(kind: type) -> None:
    assert kind.__repr__ is in_outline


def test_a_batch_shows_the_shapes_of_what_models_see() -> None:
    batch = batch_of(federation_of([0, 0]).silos[0].train, torch.tensor([1]))
    assert repr(batch).startswith("Batch(x=float32 (1, 6), y=int64 (1,), group=int64 (1,), mask=float32 (1,)")


def test_a_long_table_is_counted() -> None:
    update = Update("silo", 1, {}, {}, {f"payload-{number}": {"sum": torch.ones(2)} for number in range(9)})
    assert repr(update) == "Update(silo='silo', round=1, blocks={}, counts={}, payloads=9 entries, coded={})"
