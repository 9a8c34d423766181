"""Poisson samples: every record (or subject) is in a batch by a coin of its own, and no batch is cut short."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.outline import in_outline
from fedloom.privacy.noise import NoiseKey, Randomness


@dataclass(frozen=True, eq=False)
class Pass:
    """Rows for one pass; where ``mask`` is 0 the row is padding."""

    __repr__ = in_outline

    index: Tensor  # (rows,) int64
    mask: Tensor  # (rows,) float32


def sampling_rate(batch_size: int, units: int, silo: str) -> float:
    """The coin's probability that makes batches of the wanted size in expectation."""
    if batch_size > units:
        raise ConfigError(
            f"local.batch_size is {batch_size}, but silo '{silo}' holds {units}: "
            "under DP-SGD a batch may be at most as large as the silo"
        )
    return batch_size / units


def capacity(sizes: Tensor, rate: float) -> int:
    """Rows that one pass offers, given each unit's number of records: room for the largest unit, and for the expected
    batch with four standard deviations, in whole multiples of 8 but never more than there are records.
    """
    deviation = math.sqrt(rate * (1 - rate) * float(sizes.square().sum()))
    wanted = max(float(sizes.max()), rate * float(sizes.sum()) + 4 * deviation)
    return min(int(sizes.sum()), in_eights(wanted))


def in_eights(rows: float) -> int:
    """The next whole multiple of 8, at least 8."""
    return 8 * max(1, math.ceil(rows / 8))


def poisson_sample(randomness: Randomness, units: int, rate: float, noise_key: NoiseKey) -> Tensor:
    """Who is in the batch of this noise_key; it may be nobody."""
    return torch.nonzero(randomness.uniform(units, noise_key) < rate).flatten()


def passes(chosen: Tensor, rows: int) -> list[Pass]:
    """All chosen records in as many passes of at most ``rows`` as they need, at least one."""
    return [_padded(part) for part in torch.split(chosen, rows)]


def subject_passes(chosen: Tensor, subject: Tensor, rows: int) -> list[Pass]:
    """All records of the chosen subjects in passes of at most ``rows``; a subject's records share one pass.

    ``subject`` holds for each record the number of its subject, and ``chosen`` the numbers of the subjects.
    """
    parts, part = [], torch.empty(0, dtype=torch.int64)
    for number in chosen.tolist():
        records = torch.nonzero(subject == number).flatten()
        if len(part) + len(records) > rows:
            parts.append(part)
            part = part[:0]
        part = torch.cat((part, records))
    return [_padded(each) for each in (*parts, part)]


def _padded(index: Tensor) -> Pass:
    """Multiples of 8 rows: where shapes need not be fixed, more would only cost time."""
    padding = in_eights(len(index)) - len(index)
    mask = torch.cat((torch.ones(len(index)), torch.zeros(padding)))
    return Pass(torch.cat((index, index.new_zeros(padding))), mask)
