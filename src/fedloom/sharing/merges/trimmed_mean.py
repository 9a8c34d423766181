"""The mean without extremes: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018 (arXiv 1803.01498)."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedloom.settings import at_least
from fedloom.sharing.aggregation import Copies, Merge
from fedloom.sharing.plan import Tensors


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Merge):
    """Wrong values of up to ``trim`` silos cannot move a coordinate beyond the values of the others."""

    name = "trimmed-mean"

    trim: int = field(default=1, metadata=at_least(1))  # values that are left out at either end

    @property
    def least(self) -> int:
        """One value must be left."""
        return 2 * self.trim + 1

    def __call__(self, copies: Copies) -> Tensors:
        """Coordinate by coordinate."""
        return copies.middle(self.trim)


MERGE = TrimmedMean
