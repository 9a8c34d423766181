"""Counts of pairs of levels: what a silo sends of a table, one row of them for each level of the target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.federation.records import Records
from fedloom.methods.merged_levels import MergedLevels
from fedloom.modalities.schema import Schema
from fedloom.models.product_mixture import own_column
from fedloom.sharing.plan import Tensors

ROWS = 65_536  # records counted at once
LARGEST = 4_000  # levels and bins of all columns: their pairs are one matrix


def require_small(schema: Schema, kept: int = 0) -> None:
    """Complain of a schema with too many levels, and name the columns that have most of them."""
    if (levels := sum(MergedLevels(schema, kept).sizes)) > LARGEST:
        largest = sorted(schema.columns, key=lambda column: -column.size)[:3]
        raise ConfigError(
            f"method 'marginals' counts pairs of at most {LARGEST:,} levels and bins, and the schema's columns have "
            f"{levels:,}: give fewer to " + ", ".join(f"'{column.name}' ({column.size:,})" for column in largest)
        )


@dataclass(frozen=True)
class PairCounts:
    """The counts of a schema's pairs of levels, (parts, pairs of levels).

    Where the schema has a target of few levels, the pairs of all other columns are counted for each of its levels: of a
    record that are fewer counts than those of all pairs, they hold those with the target, and how two columns together
    speak for it. A target of many levels would leave few records in a count, so it is a column like the others.
    """

    schema: Schema
    target_levels: int  # of a target that divides the counts, at most
    kept: int = 0  # levels that pairs are counted of, at most; 0: all

    def __post_init__(self) -> None:
        if len(self.schema.columns) < 2:
            raise ConfigError("pairs of columns are counted, and the schema has one column; give it two or more")

    @cached_property
    def target(self) -> int | None:
        """The number of the column that divides the counts, where one does."""
        if not self.schema.target or len(self.schema.columns) < 3:
            return None
        number = self.schema.names.index(self.schema.target)
        return number if self.merged.sizes[number] <= self.target_levels else None

    @cached_property
    def merged(self) -> MergedLevels:
        """The codes that are paired."""
        return MergedLevels(self.schema, self.kept)

    @property
    def parts(self) -> int:
        """How many rows of counts there are."""
        return 1 if self.target is None else self.merged.sizes[self.target]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many levels each of the columns has that are paired."""
        return tuple(size for number, size in enumerate(self.merged.sizes) if number != self.target)

    @cached_property
    def counted(self) -> Tensor:
        """(levels, levels): which counts there are; none between levels of one column, and each once."""
        return (~own_column(self.sizes)).triu()

    @property
    def shape(self) -> tuple[int, int]:
        """Of all counts."""
        return self.parts, int(self.counted.sum())

    @property
    def of_one(self) -> float:
        """The norm of what one record adds: one count in each pair of columns."""
        return math.sqrt(math.comb(len(self.sizes), 2))

    def count(self, model: nn.Module, records: Records) -> Tensors:
        """All pairs in one pass over the records; whole numbers."""
        levels = sum(self.sizes)
        starts = np.cumsum((0, *self.sizes[:-1]))
        total = torch.zeros(self.parts, levels, levels, dtype=torch.float64)
        for rows in torch.split(records.x, ROWS):
            codes = self.merged.codes(model, rows.cpu().numpy())
            part = np.zeros(len(codes), dtype=np.int64)
            if self.target is not None:
                part, codes = codes[:, self.target], np.delete(codes, self.target, axis=1)
            there = torch.zeros(len(codes), levels).scatter_(1, torch.from_numpy(codes + starts), 1.0)
            for number in range(self.parts):
                of_part = there[torch.from_numpy(part == number)]
                total[number] += (of_part.T @ of_part).double()  # exact: fewer rows than float32 has whole numbers
        return {"counts": total[:, self.counted]}

    def matrices(self, counts: Tensor) -> Tensor:
        """(parts, levels, levels): the counts as symmetric matrices, 0 where there are none."""
        found = counts.new_zeros(self.parts, *self.counted.shape)
        found[:, self.counted] = counts
        return found + found.mT
