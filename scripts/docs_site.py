"""A hook of mkdocs: reference pages made from the source, pages from outside docs/, and links between all of them.

A page says ``<!-- made from the source: NAME -->`` where one of MAKERS is to put its tables.
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
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

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
from fedloom.templating import MARK, TOKENS

ROOT = Path(__file__).parents[1]
# Pages of the site that lie elsewhere in the repository.
OUTSIDE = {
    "papers/index.md": Path("papers/README.md"),
    **{f"papers/{page.parent.name}.md": page.relative_to(ROOT) for page in sorted(ROOT.glob("papers/*/README.md"))},
    **{
        f"papers/{page.parent.name}-appendix.md": page.relative_to(ROOT)
        for page in sorted(ROOT.glob("papers/*/appendix.md"))
    },
    "benchmarks.md": Path("benchmarks/README.md"),
    "contributing.md": Path("CONTRIBUTING.md"),
    "promises.md": Path("SECURITY.md"),
    "changelog.md": Path("CHANGELOG.md"),
}
# What the package's own pages look like, and are known by.
LOOKS = {
    "mark.svg": Path(fedloom.__file__).parent / MARK,
    "stylesheets/tokens.css": Path(fedloom.__file__).parent / TOKENS,
}
PICTURES = sorted(path.relative_to(ROOT) for kind in ("svg", "png") for path in ROOT.glob(f"papers/**/*.{kind}"))
SITE_PATHS = {
    "README.md": "index.md",
    **{str(path): uri for uri, path in OUTSIDE.items()},
    **{str(path): str(path) for path in PICTURES},
}
# Lists with pages or tables of their own.
ELSEWHERE = (Listed.METHODS, Listed.PRESETS, Listed.SETTINGS)
PLACE = re.compile(r"<!-- made from the source: ([\w-]+) -->")
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")
ROLE = re.compile(r":(class|func|meth|mod):(?=<code>|`)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in what lies outside docs/."""
    for uri, path in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    for uri, path in LOOKS.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    for path in PICTURES:
        files.append(File.generated(config, str(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Put in what is made from the source, and let links lead inside the site."""
    made = PLACE.sub(lambda place: MAKERS[place[1]](), markdown)
    return LINK.sub(lambda link: _linked(link, page.file.src_uri), made)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Docstrings name things by roles, which Markdown does not know."""
    return ROLE.sub("", html)


def _linked(link: re.Match[str], page: str) -> str:
    """A link as the site has it; its text alone where it leads to a file that is no page."""
    here = str(OUTSIDE.get(page, Path("docs", page)))
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link["path"]))
    uri = target.removeprefix("docs/") if target.startswith("docs/") else SITE_PATHS.get(target)
    if uri is None:
        return link["text"]
    way = posixpath.relpath(uri, posixpath.dirname(page) or ".")
    return f"[{link['text']}]({way}{link['anchor'] or ''})"


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
    """The public names of the package, for mkdocstrings to describe."""
    return "".join(f"::: fedloom.{name}\n\n" for name in fedloom.__all__)


MAKERS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "commands": commands,
    "catalogue": catalogue,
    "modality": modality,
    "api": api,
}
