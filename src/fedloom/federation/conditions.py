"""Conditions beside the class: an attribute makes of each class as many as it has values; classes as groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.errors import ConfigError, unknown
from fedloom.federation.records import UNLABELLED, Dataset, Records

BETWEEN = "|"  # in the name of a class under a condition: "cat|sex=f"


def attribute_names(attributes: Sequence[str]) -> list[str]:
    """The names in "name=value" columns, each once."""
    return list(dict.fromkeys(each.partition("=")[0] for each in attributes))


def columns_of(attributes: Sequence[str], name: str) -> list[int]:
    """The "name=value" columns of one attribute."""
    return [column for column, each in enumerate(attributes) if each.partition("=")[0] == name]


def values_of(records: Records, columns: Sequence[int], asked: str) -> Tensor:
    """Which of an attribute's columns is each record's, counted from 0; ``asked`` is the setting that wants to know."""
    assert records.attributes is not None, "a data set that names attributes has them"
    values = records.attributes[:, columns]
    if not bool(values.any(dim=1).all()):
        raise ConfigError(f"{asked}, but some records do not say what theirs is")
    return values.argmax(dim=1)


def with_condition(dataset: Dataset, attribute: str) -> Dataset:
    """The same records in classes that also tell the attribute's value; without an attribute, as they are."""
    if not attribute:
        return dataset
    if attribute not in attribute_names(dataset.attributes):
        raise ConfigError("data.condition: " + unknown("attribute", attribute, attribute_names(dataset.attributes)))
    columns = columns_of(dataset.attributes, attribute)

    def relabelled(records: Records) -> Records:
        joint = records.y * len(columns) + values_of(records, columns, f"data.condition = '{attribute}'")
        return replace(records, y=torch.where(records.y < 0, UNLABELLED, joint))

    classes = tuple(f"{name}{BETWEEN}{dataset.attributes[i]}" for name in dataset.classes for i in columns)
    return replace(dataset, train=relabelled(dataset.train), test=relabelled(dataset.test), classes=classes)


def with_classes_as_groups(dataset: Dataset) -> Dataset:
    """The same records, of which each class is a group, too."""
    if not dataset.classes or any(bool((table.y < 0).any()) for table in (dataset.train, dataset.test)):
        raise ConfigError(
            f"data.groups = 'class' needs a class for every record, which some of '{dataset.name}' do not have"
        )
    train, test = (replace(table, group=table.y) for table in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test, groups=dataset.classes)


def plain_classes(classes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The classes without conditions, and for each class the number of the plain one that it belongs to.

    >>> plain_classes(("cat|sex=f", "cat|sex=m", "dog|sex=f"))
    (('cat', 'dog'), (0, 0, 1))
    """
    plain = [name.rpartition(BETWEEN)[0] or name for name in classes]
    distinct = tuple(dict.fromkeys(plain))
    return distinct, tuple(distinct.index(name) for name in plain)
