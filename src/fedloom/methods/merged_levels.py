"""Bins and levels chosen by noisy counts of single columns, which silos release before they count pairs.

Of a column of many levels or bins pairs would be noise. So its levels are counted alone at first, at a share of the
budget, and merged to few: neighbours of about equal weight where there is an order, else all but the most frequent.
Pairs are counted of what was merged, and rows get one of its levels, as frequent as it was counted. All that leaves a
silo are noisy sums; what the server makes of them comes down with its model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.federation.records import Records
from fedloom.modalities.levels import drawn
from fedloom.modalities.schema import Codes, Numbers, Schema
from fedloom.models.product_mixture import ProductMixture
from fedloom.sharing.plan import Tensors

ROWS = 65_536  # records counted at once


@dataclass(frozen=True)
class MergedLevels:
    """The columns of a schema of which more than so many levels are merged to so many; no value stays one beside."""

    schema: Schema
    kept: int

    @cached_property
    def wide(self) -> tuple[int, ...]:
        """The numbers of those columns."""
        columns = enumerate(self.schema.columns)
        return tuple(number for number, column in columns if column.size - column.null > self.kept) if self.kept else ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many codes each column has after merging."""
        columns = enumerate(self.schema.columns)
        return tuple(self.kept + column.null if n in self.wide else column.size for n, column in columns)

    @cached_property
    def levels(self) -> list[int]:
        """How many codes those columns have before, one after the other."""
        return [self.schema.sizes[number] for number in self.wide]

    @property
    def of_one(self) -> float:
        """The norm of what one record adds to their counts: one in each."""
        return math.sqrt(len(self.wide))

    def count(self, _: nn.Module, records: Records) -> Tensors:
        """How often each of their codes occurs, end to end."""
        found = np.zeros(sum(self.levels))
        for rows in torch.split(records.x, ROWS):
            codes = self.schema.codes(rows.cpu().numpy())
            parts = zip(self.wide, self.levels, strict=True)
            found += np.concatenate([np.bincount(codes[:, number], minlength=size) for number, size in parts])
        return {"counts": torch.from_numpy(found)}

    def codes(self, model: nn.Module, values: Numbers) -> Codes:
        """What records are after merging, by what came down with the model."""
        found = self.schema.codes(values)
        if self.wide:
            assert isinstance(model, ProductMixture)
            parts = torch.split(model.decoder.places.cpu(), self.levels)
            for number, places in zip(self.wide, parts, strict=True):
                found[:, number] = places.numpy()[found[:, number]]
        return found

    def merged(self, counts: Tensor) -> Tensors:
        """For each code what it is merged to (``places``), and its share of that (``within``)."""
        places, within = [], []
        for number, noisy in zip(self.wide, torch.split(counts.double(), self.levels), strict=True):
            column, weights = self.schema.columns[number], noisy.clamp_min(0.0).numpy()
            known = weights[: len(weights) - column.null]
            place = _frequent(known, self.kept) if column.kind == "categorical" else _neighbours(known, self.kept)
            place = np.append(place, [self.kept] * column.null).astype(np.int64)
            totals, each = (np.bincount(place, w, self.kept + column.null) for w in (weights, np.ones(len(place))))
            empty = totals[place] == 0
            places.append(place)
            within.append(np.where(empty, 1 / each[place], weights / np.where(empty, 1, totals[place])))
        return {
            "places": torch.from_numpy(np.concatenate(places)),
            "within": torch.from_numpy(np.concatenate(within)).float(),
        }

    def parted(self, model: ProductMixture, codes: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """Codes as the schema has them, drawn by ``inside``, and a number in [0, 1) that says nothing of them."""
        codes, within = codes.clone(), torch.special.ndtr(inside.double()).clamp_max(1 - 1e-12)
        if not self.wide:
            return codes, within
        tables = (torch.split(table, self.levels) for table in (model.decoder.places, model.decoder.within))
        for number, places, shares in zip(self.wide, *tables, strict=True):
            chances = torch.zeros(self.sizes[number], len(places), dtype=torch.float64, device=codes.device)
            chances[places, torch.arange(len(places))] = shares.double()
            nobodys = chances.sum(dim=1) == 0  # nothing was merged to it, so no code is more likely than another
            chances[nobodys, : len(places) - self.schema.columns[number].null] = 1.0
            codes[:, number], within[:, number] = drawn(chances[codes[:, number]], inside[:, number])
        return codes, within


def _frequent(weights: Numbers, kept: int) -> Codes:
    """The most frequent levels stay, the rest are one."""
    found = np.full(len(weights), kept - 1, dtype=np.int64)
    found[np.argsort(-weights, kind="stable")[: kept - 1]] = np.arange(kept - 1)
    return found


def _neighbours(weights: Numbers, kept: int) -> Codes:
    """Runs of about equal weight: one ends where the next level would lead further past its share than it is short."""
    found, place, run, left = np.zeros(len(weights), dtype=np.int64), 0, 0.0, float(weights.sum())
    for number, weight in enumerate(weights):
        share = left / (kept - place)
        if run > 0 and place < kept - 1 and run + weight - share > share - run:
            place, left, run = place + 1, left - run, 0.0
        found[number], run = place, run + weight
    return found
