"""The median of each coordinate: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018 (arXiv 1803.01498)."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.sharing.aggregation import Copies, Merge
from fedloom.sharing.plan import Tensors


@dataclass(frozen=True, kw_only=True)
class Median(Merge):
    """Wrong values of fewer than half of the silos cannot move a coordinate beyond the values of the others."""

    name = "median"

    def __call__(self, copies: Copies) -> Tensors:
        """The middle value, or the mean of the two in the middle."""
        return copies.middle((len(copies.each) - 1) // 2)


MERGE = Median
