"""Groups that were found before the first round of a run, as its folder keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedloom.settings import parse


@dataclass(frozen=True)
class FoundSilo:
    """Where one silo belongs, and how sure that is."""

    group: str
    odds: dict[str, float]  # of each group, by the noise of what the silo sent
    place: tuple[float, ...]  # in the two directions in which silos differ most
    error: float  # of each of them: the standard deviation of noise and sampling


@dataclass(frozen=True)
class Discovery:
    """All silos by name, and what the number of groups rests on."""

    silos: dict[str, FoundSilo]
    directions: int  # in which silos differ more than noise explains
    chance: float  # how often silos without groups would look as clustered
    asked: bool = False  # whether how many to look for was set; by the loss not all branches need be taken

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> Discovery:
        """Read back what :meth:`to_mapping` gave, once it has been through JSON."""
        return parse(cls, mapping, "discovery")

    def to_mapping(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @property
    def groups(self) -> dict[str, str]:
        """The group of every silo."""
        return {name: silo.group for name, silo in self.silos.items()}

    @property
    def sentence(self) -> str:
        """What was found, and how sure that is."""
        count = len(set(self.groups.values()))
        if self.asked:
            return f"{count} groups; how many to look for was set, not found"
        if self.directions == 0:
            return "no groups were found: silos differ by no more than noise and sampling explain"
        often = f"silos without groups would look as clustered in {100 * self.chance:.2g} of 100 cases"
        return f"{count} groups were found; {often}" if count > 1 else f"no groups were found: {often}"
