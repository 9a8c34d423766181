"""Ways to merge the copies of a block; those beside the mean withstand silos that send what they should not."""

from __future__ import annotations

import sys

from fedloom.registry import Registry, values_in
from fedloom.sharing.aggregation import Mean, Merge

# The mean, and what every module here gives as ``MERGE``: adding one is adding a file.
MERGES: Registry[type[Merge]] = Registry(
    "merge",
    "fedloom.merges",
    Merge,
    lambda: {"mean": Mean, **values_in(sys.modules[__name__], "MERGE")},
    classes=True,
)
