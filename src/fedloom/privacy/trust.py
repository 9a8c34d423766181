"""Whom one must trust for an epsilon to hold, and how much noise each silo adds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from fedloom.errors import ConfigError


class Trust(Protocol):
    """Who adds the noise of a round, and so whom a silo must trust."""

    @property
    def share(self) -> float:
        """The part of the noise (as a standard deviation) that one silo adds itself."""
        ...

    @property
    def sentence(self) -> str:
        """Whom a silo must trust, in words for reports."""
        ...


@dataclass(frozen=True)
class Local:
    """Each silo adds all the noise for its own records."""

    @property
    def share(self) -> float:
        """All of the noise: a silo counts on nobody else's."""
        return 1.0

    @property
    def sentence(self) -> str:
        """That nobody outside the silo need be trusted."""
        return "each silo adds all its own noise, so nobody outside the silo need be trusted"


@dataclass(frozen=True)
class Distributed:
    """Silos share the noise, and only the sum of what they send is seen."""

    silos: int
    tolerated: int = 0  # how many may collude or drop out

    def __post_init__(self) -> None:
        if self.tolerated < 0 or self.silos - 1 - self.tolerated < 1:
            raise ConfigError(
                f"distributed noise among {self.silos} silos cannot tolerate {self.tolerated} colluders and dropouts; "
                f"allowed are 0 to {max(self.silos - 2, 0)}, with at least 2 silos"
            )

    @property
    def enough(self) -> int:
        """M - 1 - t: how many silos' noise suffices, without that of the one who asks whom to trust."""
        return self.silos - 1 - self.tolerated

    @property
    def share(self) -> float:
        """Of the standard deviation: the others' noise suffices."""
        return 1 / math.sqrt(self.enough)

    @property
    def sentence(self) -> str:
        """The aggregation, and enough other silos."""
        return (
            f"each of {self.silos} silos adds {self.share:.3g} of the noise: one must trust that only the sum is seen "
            f"(by secure sums; a simulation acts them out) and that at most {self.tolerated} silos collude or drop out"
        )
