"""Who gets which records: each partition is a name that ``data.partition`` may take.

A partition is a pure function of the data set, the configuration and the seed; it names the silos and lists
the training records of each, no record twice (but for "drawn", whose silos may share records).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fedloom.config import DataConfig
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.federation.records import Dataset
from fedloom.outline import in_outline
from fedloom.streams import Streams

Share = tuple[str, Tensor]
Shares = Sequence[Share]

SIZED = ("groups", "iid")  # the partitions that choose sizes themselves; data.sizes speaks to them alone


@dataclass(frozen=True)
class Partition:
    """A way to divide records: what it does, and the function that does it."""

    description: str
    divide: Callable[[Dataset, DataConfig, Streams], Shares]


def _sizes(total: int, config: DataConfig, streams: Streams, group: int) -> list[int]:
    """How many of ``total`` records each of ``data.silos`` silos holds.

    Equal sizes differ by at most one. Unequal sizes follow log-normal weights (sigma 1, so that the largest
    silo typically holds several times what the smallest does), and nobody gets less than one record.
    """
    if config.sizes == "equal":
        weights = torch.ones(config.silos, dtype=torch.float64)
    else:
        weights = streams.normal("sizes", config.silos, 1, step=group).flatten().to(torch.float64).exp()
    # One record for everybody, the rest by weight; rounding the running total loses and doubles nothing.
    edges = torch.round(torch.cumsum(weights, 0) / weights.sum() * (total - config.silos)).to(torch.int64)
    extra = torch.diff(edges, prepend=torch.zeros(1, dtype=torch.int64))
    return [1 + int(size) for size in extra]


def _require(records: int, wanted: int, holder: str, config: DataConfig) -> None:
    if records < wanted:
        raise DataError(
            f"data.silos = {config.silos} with data.partition = '{config.partition}' needs at least "
            f"{wanted} training records, but {holder} has {records}"
        )


def _labels(dataset: Dataset, config: DataConfig) -> Tensor:
    if not dataset.classes or bool((dataset.train.y < 0).any()):
        raise ConfigError(
            f"data.partition = '{config.partition}' needs a class for every record, which data.source = "
            f"'{config.source}' does not give; 'groups', 'iid' and 'natural' need none"
        )
    return dataset.train.y


def _numbered(parts: Iterable[Tensor]) -> Shares:
    return [(f"silo-{i}", part) for i, part in enumerate(parts)]


def by_group(dataset: Dataset, config: DataConfig, streams: Streams) -> Shares:
    """``data.silos`` silos for each group, independent and identically distributed within the group."""
    shares: list[Share] = []
    for number, name in enumerate(dataset.groups):
        members = torch.nonzero(dataset.train.group == number).flatten()
        _require(len(members), config.silos, f"group '{name}'", config)
        shuffled = members[streams.permutation("partition", len(members), step=number)]
        parts = torch.split(shuffled, _sizes(len(members), config, streams, number))
        shares += [(f"{name}-{i}", part) for i, part in enumerate(parts)]
    return shares


@dataclass(frozen=True, eq=False)
class DrawnShares(Sequence[Share]):
    """The shares of very many silos, each found when it is asked for: random records of the silo's group.

    The records of one silo are all different, and other silos may have them too.
    """

    __repr__ = in_outline

    members: tuple[Tensor, ...]  # of each group
    silos: int  # of each group
    most: int  # records of a silo; 0: all of its group
    streams: Streams

    def __len__(self) -> int:
        return len(self.members) * self.silos

    @overload
    def __getitem__(self, number: int) -> Share: ...

    @overload
    def __getitem__(self, number: slice) -> Shares: ...

    def __getitem__(self, number: int | slice) -> Share | Shares:
        places = range(len(self))[number]
        return (f"silo-{places}", self.rows(places)) if isinstance(places, int) else [self[each] for each in places]

    def rows(self, silo: int) -> Tensor:
        """The records of a silo."""
        members = self.members[silo // self.silos]
        if not self.most:
            return members
        return members[self.streams.permutation("drawn", len(members), silo=silo)[: self.size(silo)]]

    def size(self, silo: int) -> int:
        """How many there are."""
        members = self.members[silo // self.silos]
        return min(self.most or len(members), len(members))


def drawn(dataset: Dataset, config: DataConfig, streams: Streams) -> Shares:
    """``data.silos`` silos for each group, each with ``data.records_per_silo`` records drawn from all of its group."""
    members = tuple(torch.nonzero(dataset.train.group == number).flatten() for number in range(len(dataset.groups)))
    for name, rows in zip(dataset.groups, members, strict=True):
        if not len(rows):
            raise DataError(f"data.partition = 'drawn' draws from every group, but group '{name}' has no record")
    return DrawnShares(members, config.silos, config.records_per_silo, streams)


def iid(dataset: Dataset, config: DataConfig, streams: Streams) -> Shares:
    """``data.silos`` silos that all draw from everything: every silo mixes all groups and classes."""
    total = len(dataset.train)
    _require(total, config.silos, "the source", config)
    order = streams.permutation("partition", total)
    return _numbered(torch.split(order, _sizes(total, config, streams, 0)))


def dirichlet(dataset: Dataset, config: DataConfig, streams: Streams) -> Shares:
    """Each class is divided by its own Dirichlet(``data.alpha``) draw; small alpha gives a silo few classes.

    A silo that the draws leave empty takes one record from the silo that then holds most.
    """
    labels = _labels(dataset, config)
    _require(len(labels), config.silos, "the source", config)
    if math.isinf(config.alpha):
        raise ConfigError(f"data.alpha = {config.alpha} must be finite; use data.partition = 'iid' instead")
    generator = np.random.default_rng(streams.torch_seed("dirichlet"))
    parts: list[list[Tensor]] = [[] for _ in range(config.silos)]
    for label in range(len(dataset.classes)):
        members = torch.nonzero(labels == label).flatten()
        shuffled = members[streams.permutation("partition", len(members), step=label)]
        shares = generator.dirichlet(np.full(config.silos, config.alpha))
        edges = np.round(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for silo, part in enumerate(torch.tensor_split(shuffled, edges.tolist())):
            parts[silo].append(part)
    held = [torch.cat(pieces) for pieces in parts]
    for silo in range(config.silos):
        if len(held[silo]) == 0:
            richest = max(range(config.silos), key=lambda other: len(held[other]))
            held[silo], held[richest] = held[richest][-1:], held[richest][:-1]
    return _numbered(held)


def disjoint_classes(dataset: Dataset, config: DataConfig, _streams: Streams) -> Shares:
    """Silo i holds all of classes i*k to i*k + k - 1, with k = ``data.classes_per_silo``.

    With k = 2 these are the pairs {0, 1}, {2, 3}, ...; classes beyond the last silo's belong to nobody. Of each class
    ``data.records_per_class`` are taken, the first ones, if that is set.
    """
    labels = _labels(dataset, config)
    wanted = config.silos * config.classes_per_silo
    if wanted > len(dataset.classes):
        raise ConfigError(
            f"data.silos = {config.silos} with data.classes_per_silo = {config.classes_per_silo} needs "
            f"{wanted} classes, but data.source = '{config.source}' has {len(dataset.classes)}"
        )
    silo_of = labels // config.classes_per_silo
    if config.records_per_class:
        for label in range(len(dataset.classes)):
            silo_of[torch.nonzero(labels == label).flatten()[config.records_per_class :]] = -1
    return _numbered(torch.nonzero(silo_of == silo).flatten() for silo in range(config.silos))


def shards(dataset: Dataset, config: DataConfig, streams: Streams) -> Shares:
    """Records sorted by class, cut into even shards, ``data.classes_per_silo`` dealt to every silo."""
    labels = _labels(dataset, config)
    count = config.silos * config.classes_per_silo
    _require(len(labels), count, "the source", config)
    shuffled = streams.permutation("partition", len(labels))
    by_class = shuffled[torch.argsort(labels[shuffled], stable=True)]
    pieces = torch.tensor_split(by_class, count)
    hands = streams.permutation("shards", count).reshape(config.silos, config.classes_per_silo)
    return _numbered(torch.cat([pieces[piece] for piece in hand]) for hand in hands.tolist())


def by_owner(dataset: Dataset) -> Shares:
    """The silos that the source itself names, whatever ``data.silos`` says."""
    if dataset.owner is None:
        raise ConfigError(
            f"data.partition = 'natural' needs a source that knows who holds what, which '{dataset.name}' does not"
        )
    return [(name, torch.nonzero(dataset.owner == number).flatten()) for number, name in enumerate(dataset.owners)]


PARTITIONS: dict[str, Partition] = {
    "groups": Partition("data.silos silos for each group, alike within the group", by_group),
    "drawn": Partition(
        "data.silos silos for each group, however many: records are drawn, and made when the silo takes part", drawn
    ),
    "iid": Partition("data.silos silos, each a random mixture of everything", iid),
    "dirichlet": Partition("every class divided by a Dirichlet(data.alpha) draw", dirichlet),
    "classes": Partition("data.classes_per_silo classes for each silo, no class twice", disjoint_classes),
    "shards": Partition("data.classes_per_silo random shards of the records sorted by class", shards),
    "natural": Partition(
        "the silos that the source names, such as image folders", lambda dataset, _config, _streams: by_owner(dataset)
    ),
}


def partition_of(dataset: Dataset, config: DataConfig) -> str:
    """The name of the partition, where the configuration leaves it to the source too."""
    if config.partition != "auto":
        return config.partition
    return "natural" if dataset.owners else "groups"


def divide(dataset: Dataset, config: DataConfig, streams: Streams) -> Shares:
    """Divide by the configured partition, then cut silos down to ``data.records_per_silo`` if that is set."""
    config = replace(config, partition=partition_of(dataset, config))
    if config.partition not in PARTITIONS:
        raise ConfigError("data.partition: " + unknown("partition", config.partition, ["auto", *PARTITIONS]))
    if config.sizes == "unequal" and config.partition not in SIZED:
        raise ConfigError(
            f"data.sizes = 'unequal' does not fit data.partition = '{config.partition}'; "
            f"it applies to {' and '.join(SIZED)}"
        )
    if config.records_per_class and config.partition != "classes":
        raise ConfigError(f"data.records_per_class is for data.partition = 'classes', not '{config.partition}'")
    shares = PARTITIONS[config.partition].divide(dataset, config, streams)
    if config.records_per_silo == 0 or isinstance(shares, DrawnShares):
        return shares
    return [
        (
            name,
            index[streams.permutation("records-per-silo", len(index), silo=silo)[: config.records_per_silo]],
        )
        for silo, (name, index) in enumerate(shares)
    ]
