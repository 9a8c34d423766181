"""Building a federation: from the configuration, or from arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.config import DataConfig
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.federation.arrays import ONE_GROUP, Column, Examples, assemble, column, examples, joined, kind
from fedloom.federation.conditions import with_classes_as_groups, with_condition
from fedloom.federation.group_names import with_permuted_groups
from fedloom.federation.on_demand import FederationOnDemand, SilosOnDemand, check_data
from fedloom.federation.outliers import with_outliers
from fedloom.federation.partitions import DrawnShares, Shares, by_owner, divide, partition_of
from fedloom.federation.records import Dataset, Federation, Records, Silo
from fedloom.federation.sources import SOURCES
from fedloom.streams import Streams


def build_federation(config: DataConfig, streams: Streams) -> Federation:
    """Load the source, divide its records among silos, and pool them again if the layout is centralised."""
    dataset = with_condition(SOURCES.get(config.source, "data.source").open(config), config.condition)
    if config.groups == "class":
        dataset = with_classes_as_groups(dataset)
    shares = divide(dataset, config, streams)
    if isinstance(shares, DrawnShares):
        return _on_demand(dataset, shares, config)
    anew = partition_of(dataset, config) != "natural"
    if anew:  # then the source's silos are not those of the federation
        dataset = replace(dataset, test=replace(dataset.test, home=None))
    federation = with_outliers(_federation(dataset, shares, config.validation, streams), config.outliers, streams)
    if config.groups == "permuted":
        federation = with_permuted_groups(federation, streams)
    federation = replace(federation, described=config)
    if config.layout == "centralised":
        return federation.centralised()
    lost = dataset.owners if anew and len(dataset.owners) > 1 else ()  # one holder's records are nobody else's
    return replace(federation, redealt=lost)


def _on_demand(dataset: Dataset, shares: DrawnShares, config: DataConfig) -> Federation:
    check_data(config)
    each = shares.silos
    groups: dict[tuple[int, ...], range] = {
        (number,): range(number * each, (number + 1) * each) for number in range(len(dataset.groups))
    }
    sizes = np.repeat([shares.size(part[0]) for part in groups.values()], each)
    recipe = f"drawn/{shares.streams.seed}/{Silo(dataset.name, dataset.train).digest}"
    silos = SilosOnDemand(partial(_records_of, dataset.train, shares), sizes, groups, recipe)
    names = dataset.groups, dataset.classes, dataset.attributes
    return FederationOnDemand(dataset.name, silos, dataset.test, *names, described=config, pool=dataset.train)


def _records_of(pool: Records, shares: DrawnShares, silo: int) -> Records:
    return pool.take(shares.rows(silo))


def redealt(federation: Federation) -> str:
    """A sentence where silos were made up of records of which the source says who holds them; else empty."""
    if not federation.redealt or federation.described is None:
        return ""
    known, config = federation.redealt, federation.described
    named = ", ".join(known[:3]) + (", ..." if len(known) > 3 else "")
    return (
        f"'{federation.name}' says who holds what ({len(known)} silos: {named}), and data.partition = "
        f"'{config.partition}' deals their records anew among {len(federation)} silos"
    )


def check_dealt(federation: Federation) -> None:
    """Refuse to train on such silos, unless it was asked for: who holds what would be lost without a word."""
    asked = federation.described is not None and federation.described.redeal
    if (sentence := redealt(federation)) and not asked:
        raise ConfigError(
            f"{sentence}; data.partition = 'natural' keeps them, data.redeal = true says that it is meant"
        )


def federation_from_arrays(
    silos: Mapping[str, Any],
    groups: Mapping[str, str] | None = None,
    test: Mapping[str, Any] | None = None,
    name: str = "arrays",
    modality: str = "",
) -> Federation:
    """A federation of examples in memory, numpy or torch: each silo's name with its ``x``, or with ``(x, y)``.

    ``x`` holds uint8 or float images of shape (n, height, width) or (n, channels, height, width), or float features
    (n, d); ``y`` a whole number or a text for each example. ``groups`` gives each silo's group; without it there is
    one group, "all". ``test`` gives held-out examples by silo; without it a tenth of every silo is held out.
    ``modality`` is the name of what records are, where they are neither images nor vectors.
    """
    if not silos:
        raise DataError("silos is empty; give at least one silo's examples")
    for argument, given in (("groups", groups), ("test", test)):
        for silo in given or {}:
            if silo not in silos:
                raise DataError(f"{argument}: " + unknown("silo", silo, silos))
    for silo in silos:
        if groups is not None and silo not in groups:
            raise DataError(f"groups names no group for silo '{silo}'; give one to every silo")
    group_of = groups or dict.fromkeys(silos, ONE_GROUP)
    numbers = {silo: number for number, silo in enumerate(silos)}
    held_out = _pooled(test, group_of, numbers, modality) if test else None
    dataset = replace(assemble(name, _pooled(silos, group_of, numbers, modality), held_out), owners=tuple(silos))
    return _federation(dataset, by_owner(dataset))


def _federation(
    dataset: Dataset, shares: Shares, validation: float = 0.0, streams: Streams | None = None
) -> Federation:
    def silo(number: int, name: str, index: Tensor) -> Silo:
        if streams is None or not validation:
            return Silo(name, dataset.train.take(index))
        count = max(1, round(validation * len(index)))
        if count == len(index):
            raise DataError(
                f"data.validation = {validation:g} leaves silo '{name}' none of its {len(index)} records to train on"
            )
        shuffled = index[streams.permutation("validation", len(index), silo=number)]
        return Silo(name, dataset.train.take(shuffled[count:]), dataset.train.take(shuffled[:count]))

    silos = tuple(silo(number, name, index) for number, (name, index) in enumerate(shares))
    return Federation(dataset.name, silos, dataset.test, dataset.groups, dataset.classes, dataset.attributes)


def _pooled(
    silos: Mapping[str, Any], group_of: Mapping[str, str], numbers: Mapping[str, int], modality: str
) -> Examples:
    """The silos' examples as one table; silos without ``y`` get blank labels if others have some."""
    tables = {}
    for silo, given in silos.items():
        x, y = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        checked = examples(x, f"silo '{silo}'", modality)
        tables[silo] = Examples(checked, None if y is None else column(y, len(checked), f"y of silo '{silo}'"))
    first, reference = next(iter(tables.items()))
    for silo, table in tables.items():
        if kind(table.x) != kind(reference.x):
            raise DataError(f"silo '{silo}' holds {kind(table.x)}, but silo '{first}' {kind(reference.x)}")
    sizes = [len(table.x) for table in tables.values()]
    return Examples(
        x=torch.cat([table.x for table in tables.values()]),
        y=_labels(list(tables.values())),
        group=np.repeat([group_of[silo] for silo in tables], sizes),
        owner=np.repeat([numbers[silo] for silo in tables], sizes),
        kind=modality,
    )


def _labels(tables: list[Examples]) -> Column | None:
    known = next((table.y for table in tables if table.y is not None), None)
    if known is None:
        return None
    blank = -1 if known.dtype == np.int64 else ""
    return joined([np.full(len(table.x), blank) if table.y is None else table.y for table in tables])


@dataclass(frozen=True)
class SiloSummary:
    """What one silo holds: how many records, of which groups, and how many of each class."""

    name: str
    groups: tuple[str, ...]
    records: int
    classes: dict[str, int]  # only those that occur; "unlabelled" for records without a class


def describe(federation: Federation) -> list[SiloSummary]:
    """A summary of every silo that is there before anybody is drawn, in the federation's order."""

    def histogram(silo: Silo) -> dict[str, int]:
        labels, counts = torch.unique(silo.train.y, return_counts=True)
        names = ["unlabelled" if label < 0 else federation.classes[label] for label in labels.tolist()]
        return dict(zip(names, counts.tolist(), strict=True))

    return [
        SiloSummary(
            name=silo.name,
            groups=tuple(federation.groups[group] for group in silo.groups),
            records=len(silo),
            classes=histogram(silo),
        )
        for silo in federation.known
    ]
