"""Who gets which records: each partition is a name that ``data.partition`` may take.

A partition is a pure function of the data set, the configuration and the seed; it names the silos and lists
the training records of each, no record twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.config import DataConfig
from fedloom.errors import DataError
from fedloom.federation.records import Dataset
from fedloom.streams import Streams

Shares = list[tuple[str, Tensor]]


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


def by_group(dataset: Dataset, config: DataConfig, streams: Streams) -> Shares:
    """``data.silos`` silos for each group, independent and identically distributed within the group."""
    shares: Shares = []
    for number, name in enumerate(dataset.groups):
        members = torch.nonzero(dataset.train.group == number).flatten()
        _require(len(members), config.silos, f"group '{name}'", config)
        shuffled = members[streams.permutation("partition", len(members), step=number)]
        parts = torch.split(shuffled, _sizes(len(members), config, streams, number))
        shares += [(f"{name}-{i}", part) for i, part in enumerate(parts)]
    return shares


PARTITIONS: dict[str, Partition] = {
    "groups": Partition("data.silos silos for each group, alike within the group", by_group),
}
