"""The server's processes, by whatever wire its charter names; all that is known of them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.processes import Household, require_flower

Say = Callable[[str], None]


class Serving(AbstractContextManager["Serving"], Protocol):
    """A server that runs until it is stopped."""

    home: ServerDirectory
    household: Household

    def tend(self) -> None:
        """Look after its processes; to be called every few seconds."""
        ...


def _direct(home: ServerDirectory, say: Say, _proxy: bool) -> Serving:
    from fedloom.deployment.direct.serving import DirectServing

    return DirectServing(home, say)


def _flower(home: ServerDirectory, say: Say, proxy: bool) -> Serving:
    from fedloom.deployment.flower_serving import FlowerServing

    require_flower()
    return FlowerServing(home, say, proxy)


WIRES: Mapping[str, Callable[[ServerDirectory, Say, bool], Serving]] = {"direct": _direct, "flower": _flower}


def serving(home: ServerDirectory, say: Say, *, proxy: bool = True) -> Serving:
    """The server of a federation; ``proxy`` is whether nginx stands before Flower's, under that wire."""
    return WIRES[home.charter.wire](home, say, proxy)
