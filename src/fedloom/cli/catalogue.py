"""``fedloom list``: what there is to choose from."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Mapping
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any

import typer
from rich.padding import Padding

from fedloom.cli.output import Json, say, show, show_json, table
from fedloom.cli.settings_reference import settings_in_words
from fedloom.presets import about_preset, preset_names, starter_names
from fedloom.registry import HOUSE, Registry

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
    BACKBONES = "backbones"
    TABLES = "tables"
    SETTINGS = "settings"


def listing(registry: Registry[Any], summary: Callable[[Any], str]) -> dict[str, str]:
    """Every name with a line about it, which says from which package a plug-in comes."""
    return {
        name: summary(value).strip() + (f" (from {origin})" if (origin := registry.origin(name)) != HOUSE else "")
        for name, value in registry.listed()
    }


def _of(where: str, attribute: str) -> Callable[[], dict[str, str]]:
    """Lists the registry at ``package.module:NAME`` once it is asked for; the line is an attribute of each value."""
    module, _, name = where.partition(":")
    return lambda: listing(getattr(importlib.import_module(f"fedloom.{module}"), name), attrgetter(attribute))


def _partitions() -> dict[str, str]:
    from fedloom.federation.partitions import PARTITIONS

    return {name: partition.description for name, partition in PARTITIONS.items()}


def _presets() -> dict[str, str]:
    return {name: about_preset(name) for name in preset_names()}


def _backbones() -> dict[str, str]:
    from fedloom.backbones.catalogue import BACKBONES, FAMILIES, summary_of

    families = {f"{name}/...": summary_of(make("")) for name, make in FAMILIES.items()}
    return listing(BACKBONES, summary_of) | families


def _tables() -> dict[str, str]:
    from fedloom.reproduction.tables import load_table, table_names

    return {name: load_table(name).title for name in table_names()}


def _settings() -> dict[str, str]:
    return {each.key: f"{each.meaning} ({each.allowed}; {each.default})" for each in settings_in_words()}


LISTINGS: dict[Listed, Callable[[], dict[str, str]]] = {
    Listed.METHODS: _of("methods.base:METHODS", "summary"),
    Listed.MODALITIES: _of("modalities.base:MODALITIES", "summary"),
    Listed.PRESETS: _presets,
    Listed.DATASETS: _of("federation.sources:SOURCES", "description"),
    Listed.PARTITIONS: _partitions,
    Listed.NETWORKS: _of("models.networks:NETWORKS", "summary"),
    Listed.PRIORS: _of("models.priors:PRIORS", "summary"),
    Listed.SERVER_STEPS: _of("methods.server_steps:SERVER_STEPS", "summary"),
    Listed.MERGES: _of("sharing.merges:MERGES", "__doc__"),
    Listed.METRICS: _of("evaluation.metric:METRICS", "summary"),
    Listed.BACKBONES: _backbones,
    Listed.TABLES: _tables,
    Listed.SETTINGS: _settings,
}


def list_names(
    kind: Annotated[Listed, typer.Argument(help="What to list.", show_default=False)],
    beginning: Annotated[str, typer.Argument(metavar="[BEGINNING]", help="Only names that begin so.")] = "",
    papers: Annotated[bool, typer.Option("--papers", help="Of presets: the rows of papers' tables too.")] = False,
    as_json: Json = False,
) -> None:
    """List what there is to choose from, each name with a line about it."""
    found = {name: line for name, line in LISTINGS[kind]().items() if name.startswith(beginning)}
    starters = kind is Listed.PRESETS and not papers and not beginning
    if starters:
        found = {name: found[name] for name in starter_names()}
    if as_json:
        show_json(_settings_as_values(found) if kind is Listed.SETTINGS else found)
    elif kind is Listed.SETTINGS:
        _show_settings(found)
    elif starters:
        _show_starters(found)
    elif max(map(len, found), default=0) <= LONGEST_BESIDE:
        names = table(str(kind), "")
        for name, summary in found.items():
            names.add_row(name, summary)
        show(names)
    else:  # long names stand alone, so that they can be copied whole
        for name, summary in found.items():
            say(name)
            show(Padding(summary, (0, 0, 0, 4)))


def _show_starters(found: Mapping[str, str]) -> None:
    """One line each: they are to fit on a screen."""
    longest = max(map(len, found))
    room = shutil.get_terminal_size().columns - longest - 2
    for name, summary in found.items():
        say(f"{typer.style(name.ljust(longest), bold=True)}  {_cut(summary, room)}")
    say(f"and {len(preset_names()) - len(found)} rows of papers' tables: 'fedloom list presets --papers'")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)].rstrip(" ,;:") + "..."


def _show_settings(found: Mapping[str, str]) -> None:
    rows = table("setting", "type", "default", "meaning")
    rows.columns[0].no_wrap = True  # so that it can be copied whole
    for each in settings_in_words():
        if each.key in found:
            rows.add_row(each.key, each.allowed, each.default, each.meaning)
    show(rows)


def _settings_as_values(found: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {
        each.key: {"type": each.allowed, "default": each.default, "meaning": each.meaning}
        for each in settings_in_words()
        if each.key in found
    }
