"""What a run cost: bytes over the wire, parameters, steps, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import Metric, Reading, Values
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method
from fedloom.methods.steps import ServerState
from fedloom.privacy.ledger import BEFORE
from fedloom.runs.metrics import metric_key
from fedloom.sharing.plan import BlockKey, Down, Tensors


@dataclass(frozen=True)
class SiloCost:
    """What one silo sends and receives in a round, in bytes."""

    rounds: int  # in which it took part
    bytes_up: int  # all rounds together, from the egress log
    bytes_down: int


def silo_cost(method: Method, server: ServerState, site: Site, egress: Sequence[Mapping[str, Any]]) -> SiloCost:
    """What left a silo, as logged, and what its sharing plan sends down to it in those rounds."""
    sent = [row for row in egress if row["silo"] == site.name]
    rounds = sum(row["round"] != BEFORE for row in sent)  # nothing comes down before the first
    return SiloCost(rounds, sum(row["bytes"] for row in sent), rounds * bytes_down(method, server, site))


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


def cost(evaluation: Evaluation) -> Values:
    """Bytes up and down in all and per silo and round, parameters, steps, seconds; n counts rounds."""
    method, server, rounds = evaluation.generator.method, evaluation.generator.server, len(evaluation.rounds)
    found, up, down = {}, 0, 0
    silos = evaluation.participants
    for silo in silos:
        traffic = silo_cost(method, server, Site(silo.name, silo.groups), evaluation.egress)
        up, down = up + traffic.bytes_up, down + traffic.bytes_down
        if traffic.rounds:
            for name, total in (("bytes-up", traffic.bytes_up), ("bytes-down", traffic.bytes_down)):
                key = metric_key("cost", f"{name}-per-round", traffic.rounds, silo=silo.name)
                found[key] = total / traffic.rounds
    largest = max((parameters(method, Site(silo.name, silo.groups)) for silo in silos), default=0)
    totals = {
        "bytes-up": up,
        "bytes-down": down,
        "parameters": largest,
        "steps": sum(row["steps"] for row in evaluation.rounds),
        "seconds": sum(row["seconds"] for row in evaluation.rounds),
    }
    return {metric_key("cost", name, rounds): float(total) for name, total in totals.items()} | found


METRIC = Metric(
    "cost",
    cost,
    tuple(
        Reading(f"cost/{name}", title, counts="rounds", of_records=False)
        for name, title in {
            "bytes-up": "Bytes that left the silos",
            "bytes-down": "Bytes that went to the silos",
            "bytes-up-per-round": "Bytes that left in a round",
            "bytes-down-per-round": "Bytes that came in a round",
            "parameters": "Parameters of the largest silo's model",
            "steps": "Local steps",
            "seconds": "Seconds",
        }.items()
    ),
)
