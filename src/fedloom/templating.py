"""Markup lies in templates beside the rooms that use it; here it meets values, each of which is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TOKENS, MARK = "templates/tokens.css", "templates/mark.svg"  # what everything looks like, and what it is known by


def render(template: str, values: Mapping[str, object]) -> Markup:
    """The template at a path within the package, filled in; a value that is missing is a fault and raises."""
    return Markup(_environment(template.endswith(".md")).get_template(template).render(values))


def style_of(*files: str) -> Markup:
    """The one palette and type scale, and style sheets within the package that build on it."""
    paths = [Path(__file__).parent / name for name in (TOKENS, *files)]
    return Markup("".join(path.read_text(encoding="utf-8") for path in paths))


def plain(value: object) -> Markup:
    """A value on one line of Markdown, with nothing in it that is taken for a table or a tag; markup stays as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(" ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;"))


@cache
def _environment(markdown: bool) -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=plain if markdown else None,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
