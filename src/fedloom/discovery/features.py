"""What a record adds to its silo's one release: a vector of length 1, by a public map that was made without any record.

The mean of such vectors tells distributions apart, not only their means: random Fourier features of Gaussian kernels
(Rahimi, Recht, "Random Features for Large-Scale Kernel Machines", NeurIPS 2007), here of many widths at once, because
nobody may look at the records for the right one. Pictures are shrunk first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.federation.records import Batch
from fedloom.streams import Streams

EMBEDDING = "embedding"
SIDE = 8  # of a shrunk picture
# Standard deviations of frequencies, times the root of the number of values; the last is 1 at least, for vectors of
# length 1 in many dimensions.
LEAST, MOST = 0.5, 8.0


@dataclass(frozen=True)
class FourierFeatures:
    """Cosines and sines at random frequencies, from a seed that everybody knows."""

    frequencies: int
    seed: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what one record adds."""
        return {EMBEDDING: (2 * self.frequencies,)}

    def __call__(self, _: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """One row for each record, of length 1 whatever the record; a value that is no number counts as 0."""
        values = torch.nan_to_num(_shrunk(batch.x))
        angles = values @ _drawn(self.frequencies, values.shape[1], self.seed)
        angles = torch.nan_to_num(angles, posinf=0.0, neginf=0.0)
        return {EMBEDDING: torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(self.frequencies)}


@lru_cache(maxsize=4)
def _drawn(frequencies: int, values: int, seed: int) -> Tensor:
    """Frequencies of all widths, (values, frequencies)."""
    least, most = LEAST / math.sqrt(values), max(MOST / math.sqrt(values), 1.0)
    scales = least * (most / least) ** ((torch.arange(frequencies) + 0.5) / frequencies)
    return Streams(seed).normal("discovery", values, frequencies) * scales


def _shrunk(x: Tensor) -> Tensor:
    """Pictures of at most ``SIDE`` pixels a side, others as they are, as vectors."""
    if x.dim() == 4 and x.shape[-1] > SIDE:
        x = functional.adaptive_avg_pool2d(x, SIDE)
    return x.flatten(1)
