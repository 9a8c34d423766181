"""What a coordinator does with runs and sees of silos, by whatever wire the charter names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.processes import require_flower
from fedloom.deployment.submissions import Submission


class Conductor(Protocol):
    """Calls to the server of this machine."""

    @property
    def answers(self) -> bool:
        """Whether it is there."""
        ...

    def silos(self) -> dict[str, dict[str, Any]]:
        """What is known of the silos that have been there: whether they are, and on what device they train."""
        ...

    def start(self, submission: Submission) -> None:
        """Let a run be carried out."""
        ...

    def ending(self) -> str:
        """Why the run that was started cannot come to an end any more; empty while it can."""
        ...

    def stop(self) -> None:
        """End the run that was started."""
        ...


def _direct(home: ServerDirectory) -> Conductor:
    from fedloom.deployment.direct.conductor import DirectConductor

    return DirectConductor(home)


def _flower(home: ServerDirectory) -> Conductor:
    from fedloom.deployment.control import FlowerConductor

    require_flower()
    return FlowerConductor(home)


WIRES: Mapping[str, Callable[[ServerDirectory], Conductor]] = {"direct": _direct, "flower": _flower}


def conductor_of(home: ServerDirectory) -> Conductor:
    """The way to a federation's server."""
    return WIRES[home.charter.wire](home)
