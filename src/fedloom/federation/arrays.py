"""From arrays to a data set: checks, channel axes, class numbers, held-out records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import DataError
from fedloom.federation.records import UNLABELLED, Dataset, Records
from fedloom.modalities.base import modality_of
from fedloom.outline import in_outline
from fedloom.streams import Streams

Column = NDArray[Any]  # a whole number or a text for each example

ONE_GROUP = "all"  # the group of records that were given none


@dataclass(frozen=True)
class Examples:
    """Checked examples with what is known about each: its class, its group, its owner, its subject, its attributes."""

    __repr__ = in_outline

    x: Tensor
    y: Column | None = None
    group: Column | None = None
    owner: Column | None = None
    subject: Column | None = None
    attributes: Mapping[str, Column] = field(default_factory=dict)
    kind: str = ""  # the name of their modality, where it was given

    def rows(self, index: NDArray[np.int64]) -> Examples:
        """The rows at ``index``, in that order."""
        return Examples(
            x=self.x[torch.from_numpy(index)],
            y=None if self.y is None else self.y[index],
            group=None if self.group is None else self.group[index],
            owner=None if self.owner is None else self.owner[index],
            subject=None if self.subject is None else self.subject[index],
            attributes={name: values[index] for name, values in self.attributes.items()},
            kind=self.kind,
        )


def examples(values: Any, name: str, kind: str = "") -> Tensor:
    """An array as the records of that modality are stored; without one, as images or as vectors."""
    array = _as_numpy(values, name)
    return modality_of(kind, array.shape[1:]).read(array, name)


def column(values: Any, count: int, name: str) -> Column:
    """One whole number or text for each of ``count`` examples."""
    array = _as_numpy(values, name)
    if array.shape not in ((count,), (count, 1)):
        raise DataError(f"{name} has shape {array.shape}; give one value for each of the {count} examples")
    if not (np.issubdtype(array.dtype, np.integer) or np.issubdtype(array.dtype, np.str_)):
        raise DataError(f"{name} holds {array.dtype} values; give whole numbers or texts")
    return array.reshape(count).astype(np.int64 if np.issubdtype(array.dtype, np.integer) else np.str_)


def _as_numpy(values: Any, name: str) -> NDArray[Any]:
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError):  # rows of different length, or a dtype that numpy lacks
        raise DataError(f"{name} cannot be read as one array; give rows of equal length and one type") from None


def assemble(name: str, train: Examples, test: Examples | None = None) -> Dataset:
    """Number classes, groups and owners in sorted order; without ``test``, hold out a tenth of each owner."""
    if test is None:
        train, test = hold_out(train)
    if test.x.shape[1:] != train.x.shape[1:] or test.x.dtype != train.x.dtype:
        raise DataError(
            f"the held-out examples of '{name}' are {kind(test.x)}, but those to train on are {kind(train.x)}"
        )
    if test.attributes.keys() != train.attributes.keys():
        raise DataError(f"'{name}' gives attributes to some of its records only; give them to all, held-out ones too")
    classes, groups, owners = _distinct(train.y, test.y), _distinct(train.group, test.group), _distinct(train.owner)
    subjects = _distinct(train.subject, test.subject)
    attributes = {key: _distinct(train.attributes[key], test.attributes[key]) for key in sorted(train.attributes)}

    def whole(what: str, column: Column | None, distinct: Column, count: int) -> Tensor:
        numbers = _numbers(column, distinct, count)
        if bool((numbers == UNLABELLED).any()):
            raise DataError(f"'{name}' gives some of its records no {what}; give one to all, held-out ones too")
        return numbers

    def records(table: Examples) -> Records:
        count = len(table.x)
        group = whole("group", table.group, groups, count) if len(groups) else torch.zeros(count, dtype=torch.int64)
        return Records(
            x=table.x,
            y=_numbers(table.y, classes, count),
            group=group,
            subject=None if table.subject is None else whole("subject", table.subject, subjects, count),
            attributes=_one_hot(table, attributes) if attributes else None,
            kind=table.kind,
        )

    home = None if test.owner is None else _numbers(test.owner, owners, len(test.x))
    return Dataset(
        name=name,
        train=records(train),
        test=replace(records(test), home=home),
        groups=tuple(map(str, groups)) or (ONE_GROUP,),
        classes=tuple(map(str, classes)),
        owners=tuple(map(str, owners)),
        owner=whole("owner", train.owner, owners, len(train.x)) if len(owners) else None,
        attributes=tuple(f"{key}={value}" for key, values in attributes.items() for value in values),
    )


def _one_hot(table: Examples, attributes: Mapping[str, Column]) -> Tensor:
    """For each value of each attribute 1 where a record has it; an attribute that is not known is all zeros."""
    return torch.cat(
        [torch.from_numpy(table.attributes[key][:, None] == values) for key, values in attributes.items()], dim=1
    ).to(torch.float32)


def hold_out(table: Examples) -> tuple[Examples, Examples]:
    """Set a tenth of each owner's records aside, at least one of two: (kept, held out).

    The choice is the same for every seed of an experiment: all seeds are measured on the same records.
    """
    owner = np.zeros(len(table.x), dtype=np.int64) if table.owner is None else table.owner
    held = np.zeros(len(table.x), dtype=np.bool_)
    for number, name in enumerate(np.unique(owner)):
        members = np.flatnonzero(owner == name)
        order = Streams(0).permutation("held-out", len(members), silo=number).numpy()
        count = max(len(members) // 10, 1) if len(members) > 1 else 0
        held[members[order[:count]]] = True
    if not held.any():
        raise DataError("there are too few examples to hold any out; give a silo at least two, or held-out ones")
    return table.rows(np.flatnonzero(~held)), table.rows(np.flatnonzero(held))


def _distinct(*columns: Column | None) -> Column:
    """The values that occur, sorted; a negative whole number or an empty text means that nothing is known."""
    known = [column for column in columns if column is not None]
    if not known:
        return np.array([], dtype=np.int64)
    values = np.unique(joined(known))
    return values[values >= 0] if values.dtype == np.int64 else values[values != ""]


def joined(columns: Sequence[Column]) -> Column:
    """Columns end to end; whole numbers and texts do not mix."""
    if len({column.dtype == np.int64 for column in columns}) > 1:
        raise DataError("labels are whole numbers here and texts there; give one kind for all records")
    return np.concatenate(columns)


def _numbers(column: Column | None, distinct: Column, count: int) -> Tensor:
    """The position of each value among the distinct ones, UNLABELLED where it is not known."""
    numbers = np.full(count, UNLABELLED, dtype=np.int64)
    if column is not None:
        known = np.isin(column, distinct)
        numbers[known] = np.searchsorted(distinct, column[known])
    return torch.from_numpy(numbers)


def kind(x: Tensor) -> str:
    """What examples are, for a complaint that they differ."""
    return f"{x.dtype} of shape {tuple(x.shape[1:])}"
