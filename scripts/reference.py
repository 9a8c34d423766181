"""Reference pages that are made from the source: settings, commands, the catalogue, modalities, public names.

    python scripts/reference.py

A page of docs/reference has ``<!-- made from the source: NAME -->`` where one of MAKERS puts its tables, and
``<!-- end of what is made -->`` after them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, fields
from inspect import cleandoc, getmodule
from pathlib import Path
from typing import Any

import click
import typer

import fedloom
from fedloom.cli import app
from fedloom.cli.catalogue import LISTINGS, Listed
from fedloom.cli.settings_reference import allowed_of, default_of, meanings, settings_of
from fedloom.config import Config
from fedloom.methods.base import METHODS
from fedloom.modalities.base import Modality
from fedloom.presets import preset_names
from fedloom.registry import HOUSE
from fedloom.sharing.merges import MERGES

PAGES = Path(__file__).parents[1] / "docs" / "reference"
# Lists with pages or tables of their own.
ELSEWHERE = (Listed.METHODS, Listed.PRESETS, Listed.SETTINGS)
PLACE = re.compile(r"<!-- made from the source: ([\w-]+) -->\n(.*?)<!-- end of what is made -->\n", re.DOTALL)
ROLE = re.compile(r":(class|func|meth|mod):(?=<code>|`)")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def settings() -> str:
    """The configuration tree, a table for each section."""
    sections: dict[type, list[list[str]]] = {}
    for key, cls, found, hint in settings_of(Config):
        key = key.replace(".options", ".<option>")
        sections.setdefault(cls, []).append([f"`{key}`", *_described(cls, found, hint)])
    parts = []
    for cls, rows in sections.items():
        section = rows[0][0].strip("`").rpartition(".")[0]
        parts.append(f"### {f'`{section}`' if section else 'The experiment'}\n\n{_text(cls)}\n\n")
        parts.append(table(["key", "default", "allowed", "meaning"], rows) + "\n")
    return "".join(parts)


def _described(cls: type, found: Field[Any], hint: Any) -> list[str]:
    return [f"`{default_of(found)}`", allowed_of(found, hint), meanings(cls).get(found.name, "")]


def _text(thing: Any) -> str:
    """A docstring as Markdown."""
    return ROLE.sub("", cleandoc(thing.__doc__ or "")).replace("``", "`")


def commands() -> str:
    """Every command with its arguments and options."""
    return "".join(_command(typer.main.get_command(app), "fedloom", None))


def _command(command: click.Command, path: str, parent: click.Context | None) -> Iterator[str]:
    context = click.Context(command, parent, info_name=path.rpartition(" ")[2])
    if isinstance(command, click.Group):
        yield f"## `{path}`\n\n{command.help}\n\n{_parameters(command.params)}\n"
        for name in command.list_commands(context):
            if (inner := command.get_command(context, name)) is not None:
                yield from _command(inner, f"{path} {name}", context)
    else:
        usage = " ".join([path, *command.collect_usage_pieces(context)])
        yield f"## `{path}`\n\n{command.help}\n\n```text\n{usage}\n```\n\n{_parameters(command.params)}\n"


def _parameters(parameters: Sequence[click.Parameter]) -> str:
    rows = []
    for parameter in parameters:
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if isinstance(parameter, click.Argument):
            names = parameter.human_readable_name
        shown = getattr(parameter, "show_default", False)
        default = shown if isinstance(shown, str) else "" if not shown else str(parameter.default)
        default = "" if default in ("None", "False") else default
        rows.append([f"`{names}`", getattr(parameter, "help", None) or "", f"`{default}`" if default else ""])
    return table(["argument or option", "meaning", "default"], rows) if rows else ""


def catalogue() -> str:
    """What 'fedloom list' prints, and what each method can be told."""
    parts = ["## Methods\n\n"]
    for name, recipe in METHODS.listed():
        brought = "" if METHODS.origin(name) == HOUSE else f"\n\nFrom the package `{METHODS.origin(name)}`."
        parts.append(f"### `{name}`\n\n{_text(getmodule(recipe.make))}{brought}\n\n")
        rows = [
            [f"`method.{found.name}`", *_described(recipe.options, found, hint)]
            for _, _, found, hint in settings_of(recipe.options)
        ]
        if rows:
            options = table(["option", "default", "allowed", "remarks"], rows)
            parts.append(f"{_text(recipe.options)}\n\n{options}\n")
    parts.append("## Settings of merges\n\n" + table(["option", "default", "allowed", "remarks"], _merges()) + "\n")
    for kind in (kind for kind in Listed if kind not in ELSEWHERE):
        rows = [[f"`{name}`", summary] for name, summary in LISTINGS[kind]().items()]
        parts.append(f"## {kind.value.capitalize()}\n\n{table([kind.value[:-1], 'what it is'], rows)}\n")
    parts.append("## Presets\n\n" + table(["family", "presets", "an example"], _families()))
    return "".join(parts)


def _merges() -> list[list[str]]:
    """What each way to merge can be told."""
    return [
        [f"`server.merge.{found.name}` of `{name}`", *_described(merge, found, hint)]
        for name, merge in MERGES.listed()
        for _, _, found, hint in settings_of(merge)
    ]


def _families() -> list[list[str]]:
    """Presets by the folder that they lie in."""
    families: dict[str, list[str]] = {}
    for name in preset_names():
        families.setdefault(posixpath.dirname(name) or "(at the top)", []).append(name)
    return [[f"`{family}`", str(len(names)), f"`{names[0]}`"] for family, names in families.items()]


def modality() -> str:
    """The fields of a modality."""
    rows = [[f"`{found.name}`", meanings(Modality).get(found.name, "")] for found in fields(Modality)]
    return table(["field", "what it is"], rows)


def api() -> str:
    """The public names of the package, with what they are for."""
    rows = [[f"`fedloom.{name}`", _summary(getattr(fedloom, name))] for name in fedloom.__all__]
    return table(["name", "what it is"], rows)


def _summary(thing: Any) -> str:
    """The first paragraph of a docstring; a value that has none is shown."""
    described = isinstance(thing, type) or callable(thing)
    return " ".join(_text(thing).split("\n\n")[0].split()) if described else f"`{thing}`"


MAKERS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "commands": commands,
    "catalogue": catalogue,
    "modality": modality,
    "api": api,
}


def made(page: str) -> str:
    """The page with all that is made from the source, as the source is now."""

    def block(place: re.Match[str]) -> str:
        opening, closing = f"<!-- made from the source: {place[1]} -->", "<!-- end of what is made -->"
        return f"{opening}\n\n{MAKERS[place[1]]().rstrip()}\n\n{closing}\n"

    return PLACE.sub(block, page)


def main() -> None:
    """Write every page of docs/reference anew."""
    for path in sorted(PAGES.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        path.write_text(made(page), encoding="utf-8")


if __name__ == "__main__":
    main()
