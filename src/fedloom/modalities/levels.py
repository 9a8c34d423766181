"""How networks see a row of a table: each column as its levels or bins, one of which is 1 and the others 0.

What a network puts out for a row is one number for each level of each column, end to end. From their chances a row is
drawn, a level for each column and a value of that level: a mean of levels would be no row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedloom.modalities.rules import TRIES, keeping
from fedloom.modalities.schema import Schema


@dataclass(frozen=True)
class Levels:
    """Each column has one of its levels, whose logits the decoder gives."""

    sizes: tuple[int, ...]
    steepness: ClassVar[float] = 0.5  # of the softmax of one column, at two levels of chance 1/2
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def negative_log(self, x: Tensor, output: Tensor) -> Tensor:
        """Cross-entropy, summed over the columns."""
        chances = torch.cat([torch.log_softmax(part, dim=-1) for part in self._columns(output)], dim=-1)
        return -(x * chances).sum(dim=-1)

    def mean(self, output: Tensor) -> Tensor:
        """The chance of each level."""
        return torch.cat([torch.softmax(part, dim=-1) for part in self._columns(output)], dim=-1)

    def sample(self, mean: Tensor, noise: Tensor) -> Tensor:
        """One level of each column; of the noise the first number of each column is used."""
        found = []
        for chances, normal in zip(self._columns(mean), self._columns(noise), strict=True):
            level, _ = drawn(chances, normal[..., 0])
            found.append(functional.one_hot(level, chances.shape[-1]).to(mean.dtype))
        return torch.cat(found, dim=-1)

    def _columns(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x, list(self.sizes), dim=-1)


def drawn(chances: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
    """A level by a standard normal number, and a number in [0, 1) that says nothing of the level."""
    ends = chances.double().cumsum(dim=-1)
    place = torch.special.ndtr(normal.double()).unsqueeze(-1) * ends[..., -1:]
    level = (place >= ends).sum(dim=-1, keepdim=True).clamp_max(chances.shape[-1] - 1)
    width = chances.double().gather(-1, level)
    inside = 1 - (ends.gather(-1, level) - place) / width.clamp_min(torch.finfo(torch.float64).tiny)
    return level.squeeze(-1), inside.squeeze(-1).clamp(0, 1 - 1e-12)


@dataclass(frozen=True)
class Coding:
    """The way from rows as stored to what networks see, and back."""

    schema: Schema

    def seen(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One number for each level in place of one for each column."""
        return (*shape[:-1], sum(self.schema.sizes))

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each level its column, the least value that it has, the first that it has no more, and if it is none."""
        places, lows, highs, nothing = [], [], [], []
        for number, column in enumerate(self.schema.columns):
            inner = [level + 0.5 for level in range(len(column.levels) - 1)] or list(column.edges[1:-1])
            lows += [-math.inf, *inner] + [math.inf] * column.null
            highs += [*inner, math.inf] + [-math.inf] * column.null
            nothing += [False] * (len(inner) + 1) + [True] * column.null
            places += [number] * column.size
        reals = (torch.tensor(values, dtype=torch.float64) for values in (lows, highs))
        return torch.tensor(places), *reals, torch.tensor(nothing)  # type: ignore[return-value]

    def decode(self, x: Tensor) -> Tensor:
        """Rows as stored: 1 for the level that each value has, else 0."""
        places, lows, highs, nothing = (each.to(x.device) for each in self._bounds)
        values = x[..., places]
        missing = torch.isnan(values)
        return torch.where(nothing, missing, (values >= lows) & (values < highs)).to(torch.float32)

    def coordinates(self, x: Tensor) -> Tensor:
        """In which levels are 1 apart, numbers their share of the bounds, and no value .87 to 1 from any number."""
        found = []
        for number, column in enumerate(self.schema.columns):
            values = x[..., number].double()
            if column.levels:
                level = torch.where(torch.isnan(values), column.nothing, values).long()
                found.append(functional.one_hot(level, column.size) / math.sqrt(2))
                continue
            known, width = ~torch.isnan(values), max(column.edges[-1] - column.edges[0], 1e-300)
            share = torch.where(known, (values - column.edges[0]) / width, 0.5)
            aside = torch.where(known, 0.0, math.sqrt(3) / 2)
            found.append(torch.stack([share, aside], dim=-1))
        return torch.cat(found, dim=-1).to(torch.float32)

    @property
    def noise(self) -> tuple[int, ...]:
        """The standard normal numbers that a row is drawn by; where there are rules, it is one of several draws."""
        return (TRIES if self.schema.rules else 1, len(self.schema.columns))

    def draw(self, chances: Tensor, noise: Tensor) -> Tensor:
        """Rows as stored, each drawn by its chances, that keep to the schema's rules."""
        parts = torch.split(chances.unsqueeze(1).expand(-1, len(noise[0]), -1), list(self.schema.sizes), dim=-1)
        pairs = [drawn(part, noise[..., number]) for number, part in enumerate(parts)]
        codes, inside = (torch.stack(each, dim=-1).cpu().numpy() for each in zip(*pairs, strict=True))
        flat = codes.reshape(-1, codes.shape[-1]), inside.reshape(-1, codes.shape[-1])
        values = self.schema.values(*flat).reshape(codes.shape)
        return torch.from_numpy(keeping(self.schema.checks, np.swapaxes(values, 0, 1))).to(chances.device)
