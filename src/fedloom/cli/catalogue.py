"""``fedloom list``: what there is to choose from."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, TypeVar

import typer
from rich.padding import Padding

from fedloom.cli.output import Json, say, show, show_json, table
from fedloom.presets import about_preset, preset_names
from fedloom.registry import HOUSE, Registry

T = TypeVar("T")
LONGEST_BESIDE = 24  # letters of a name that still has its summary beside it


class Listed(StrEnum):
    """What can be listed."""

    METHODS = "methods"
    MODALITIES = "modalities"
    PRESETS = "presets"
    DATASETS = "datasets"
    PARTITIONS = "partitions"
    NETWORKS = "networks"
    PRIORS = "priors"
    SERVER_STEPS = "server-steps"
    MERGES = "merges"
    METRICS = "metrics"
    TABLES = "tables"


def listing(registry: Registry[T], summary: Callable[[T], str]) -> dict[str, str]:
    """Every name with a line about it, which says from which package a plug-in comes."""
    return {
        name: summary(value) + (f" (from {origin})" if (origin := registry.origin(name)) != HOUSE else "")
        for name, value in registry.listed()
    }


def _methods() -> dict[str, str]:
    from fedloom.methods.base import METHODS

    return listing(METHODS, lambda recipe: recipe.summary)


def _modalities() -> dict[str, str]:
    from fedloom.modalities.base import MODALITIES

    return listing(MODALITIES, lambda found: f"{found.plural}; likelihoods {', '.join(found.likelihoods)}")


def _presets() -> dict[str, str]:
    return {name: about_preset(name) for name in preset_names()}


def _datasets() -> dict[str, str]:
    from fedloom.federation.sources import SOURCES

    return listing(SOURCES, lambda source: source.description)


def _partitions() -> dict[str, str]:
    from fedloom.federation.partitions import PARTITIONS

    return {name: partition.description for name, partition in PARTITIONS.items()}


def _networks() -> dict[str, str]:
    from fedloom.models.networks import NETWORKS

    return listing(NETWORKS, lambda network: network.summary)


def _priors() -> dict[str, str]:
    from fedloom.models.priors import PRIORS

    return listing(PRIORS, lambda prior: prior.summary)


def _server_steps() -> dict[str, str]:
    from fedloom.methods.server_steps import SERVER_STEPS

    return listing(SERVER_STEPS, lambda rule: rule.summary)


def _merges() -> dict[str, str]:
    from fedloom.sharing.merges import MERGES

    return listing(MERGES, lambda merge: (merge.__doc__ or "").strip())


def _metrics() -> dict[str, str]:
    from fedloom.evaluation.metric import METRICS

    return listing(METRICS, lambda metric: metric.summary)


def _tables() -> dict[str, str]:
    from fedloom.reproduction.tables import load_table, table_names

    return {name: load_table(name).title for name in table_names()}


LISTINGS: dict[Listed, Callable[[], dict[str, str]]] = {
    Listed.METHODS: _methods,
    Listed.MODALITIES: _modalities,
    Listed.PRESETS: _presets,
    Listed.DATASETS: _datasets,
    Listed.PARTITIONS: _partitions,
    Listed.NETWORKS: _networks,
    Listed.PRIORS: _priors,
    Listed.SERVER_STEPS: _server_steps,
    Listed.MERGES: _merges,
    Listed.METRICS: _metrics,
    Listed.TABLES: _tables,
}


def list_names(
    kind: Annotated[Listed, typer.Argument(help="What to list.", show_default=False)], as_json: Json = False
) -> None:
    """List what there is to choose from, each name with a line about it."""
    found = LISTINGS[kind]()
    if as_json:
        show_json(found)
        return
    if max(map(len, found), default=0) <= LONGEST_BESIDE:
        names = table(str(kind), "")
        for name, summary in found.items():
            names.add_row(name, summary)
        show(names)
    else:  # long names stand alone, so that they can be copied whole
        for name, summary in found.items():
            say(name)
            show(Padding(summary, (0, 0, 0, 4)))
