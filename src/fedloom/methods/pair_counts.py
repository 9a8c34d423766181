"""Counts of pairs of levels: what a silo sends of a table, as one matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.federation.records import Records
from fedloom.modalities.schema import Schema
from fedloom.models.product_mixture import own_column
from fedloom.sharing.plan import Tensors

ROWS = 65_536  # records counted at once
LARGEST = 4_000  # levels and bins of all columns: their pairs are one matrix


def require_small(schema: Schema) -> None:
    """Complain of a schema with too many levels, and name the columns that have most of them."""
    if (levels := sum(schema.sizes)) > LARGEST:
        largest = sorted(schema.columns, key=lambda column: -column.size)[:3]
        raise ConfigError(
            f"method 'marginals' counts pairs of at most {LARGEST:,} levels and bins, and the schema's columns have "
            f"{levels:,}: give fewer to " + ", ".join(f"'{column.name}' ({column.size:,})" for column in largest)
        )


@dataclass(frozen=True)
class PairCounts:
    """The counts of a schema's pairs of levels, (levels, levels) above the diagonal, and how they are weighed."""

    schema: Schema
    target_weight: float

    @property
    def weights(self) -> Tensor:
        """Of each count; 0 between levels of one column, and below the diagonal."""
        sizes = self.schema.sizes
        column = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        aimed = column == (self.schema.names.index(self.schema.target) if self.schema.target else -1)
        weights = torch.where(aimed.unsqueeze(0) | aimed.unsqueeze(1), self.target_weight, 1.0).double()
        return torch.where(own_column(sizes), 0.0, weights).triu()

    @property
    def of_one(self) -> float:
        """The norm of what one record adds: one weighed count in each pair of columns."""
        columns, aimed = len(self.schema.sizes), (len(self.schema.sizes) - 1) * bool(self.schema.target)
        return math.sqrt(math.comb(columns, 2) - aimed + aimed * self.target_weight**2)

    def count(self, _: nn.Module, records: Records) -> Tensors:
        """All pairs in one pass over the records; whole numbers."""
        levels = sum(self.schema.sizes)
        starts = np.cumsum((0, *self.schema.sizes[:-1]))
        total = torch.zeros(levels, levels, dtype=torch.float64)
        for part in torch.split(records.x, ROWS):
            codes = torch.from_numpy(self.schema.codes(part.cpu().numpy()) + starts)
            there = torch.zeros(len(part), levels).scatter_(1, codes, 1.0)
            total += (there.T @ there).double()  # exact: fewer rows than float32 has whole numbers
        return {"counts": torch.where(own_column(self.schema.sizes), 0.0, total).triu()}

    def weigh(self, counts: Tensors) -> Tensors:
        """As they are sent."""
        return {"counts": counts["counts"] * self.weights}
