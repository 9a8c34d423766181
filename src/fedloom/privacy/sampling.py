"""Poisson samples: every record (or subject) is in a batch by a coin of its own, and no batch is cut short."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.privacy.noise import Moment, Randomness


@dataclass(frozen=True, eq=False)
class Pass:
    """Rows for one fixed-shape pass; where ``mask`` is 0 the row is padding."""

    index: Tensor  # (capacity,) int64
    mask: Tensor  # (capacity,) float32


def sampling_rate(batch_size: int, units: int, silo: str) -> float:
    """The coin's probability that makes batches of the wanted size in expectation."""
    if batch_size > units:
        raise ConfigError(
            f"local.batch_size is {batch_size}, but silo '{silo}' holds {units}: "
            "under DP-SGD a batch may be at most as large as the silo"
        )
    return batch_size / units


def capacity(units: int, rate: float) -> int:
    """Rows that one pass offers: the expected batch and four standard deviations, in whole multiples of 8."""
    wanted = units * rate + 4 * math.sqrt(units * rate * (1 - rate))
    return min(units, 8 * math.ceil(wanted / 8))


def poisson_sample(randomness: Randomness, units: int, rate: float, moment: Moment) -> Tensor:
    """Who is in the batch of this moment; it may be nobody."""
    return torch.nonzero(randomness.uniform(units, moment) < rate).flatten()


def passes(chosen: Tensor, rows: int) -> list[Pass]:
    """All chosen records in as many passes as they need, at least one."""
    return [_padded(part, rows) for part in torch.split(chosen, rows)]


def subject_passes(chosen: Tensor, subject: Tensor, rows: int) -> list[Pass]:
    """All records of the chosen subjects; a subject's records share one pass, which its size may have to widen.

    ``subject`` holds for each record the number of its subject, and ``chosen`` the numbers of the subjects.
    """
    owned = [torch.nonzero(subject == number).flatten() for number in chosen.tolist()]
    rows = max([rows, *map(len, owned)])
    parts, part = [], torch.empty(0, dtype=torch.int64)
    for records in owned:
        if len(part) + len(records) > rows:
            parts.append(part)
            part = part[:0]
        part = torch.cat((part, records))
    return [_padded(each, rows) for each in (*parts, part)]


def _padded(index: Tensor, rows: int) -> Pass:
    padding = rows - len(index)
    mask = torch.cat((torch.ones(len(index)), torch.zeros(padding)))
    return Pass(torch.cat((index, index.new_zeros(padding))), mask)
