"""What a run cost: bytes over the wire, parameters, steps, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.federation.rounds import Site
from fedloom.methods.base import Method
from fedloom.methods.steps import ServerState
from fedloom.sharing.plan import BlockKey, Down, Tensors


@dataclass(frozen=True)
class SiloCost:
    """One silo's traffic."""

    rounds: int  # in which it took part
    bytes_up: int  # all rounds together, from the egress log
    bytes_down: int


def silo_cost(method: Method, server: ServerState, site: Site, egress: Sequence[Mapping[str, Any]]) -> SiloCost:
    """What left a silo, as logged, and what its sharing plan sends down to it in those rounds."""
    sent = [row["bytes"] for row in egress if row["silo"] == site.name]
    return SiloCost(len(sent), sum(sent), len(sent) * bytes_down(method, server, site))


def bytes_down(method: Method, server: ServerState, site: Site) -> int:
    """What a site receives at the start of a round."""
    total = 0
    for block, rule in method.plan.blocks.items():
        for key in method.plan.prefixes(block, site).values():
            source = {Down.MERGED: key, Down.SERVER: BlockKey(block, "server")}.get(rule.down)
            total += _bytes(server.blocks.get(source, {})) if source else 0
    return total


def parameters(method: Method, site: Site) -> int:
    """The size of the model that a site trains."""
    return sum(parameter.numel() for parameter in method.build(site).parameters())


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
