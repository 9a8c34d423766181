"""What the settings are, read off the source: their types, defaults, and the comments beside them."""

from __future__ import annotations

import io
import re
import tokenize
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from inspect import getsource
from typing import Any, Literal

from fedloom.config import Config


@dataclass(frozen=True)
class SettingInWords:
    """A setting as a page or a list shows it."""

    key: str
    allowed: str
    default: str
    meaning: str


def settings_in_words() -> Iterator[SettingInWords]:
    """Every setting of an experiment."""
    for key, cls, found, hint in settings_of(Config):
        yield SettingInWords(
            key.replace(".options", ".<option>"),
            allowed_of(found, hint).replace("`", ""),
            default_of(found),
            meanings(cls).get(found.name, ""),
        )


@cache
def meanings(cls: type) -> dict[str, str]:
    """What the comments above and beside each field of a dataclass say."""
    found: dict[str, str] = {}
    above: list[str] = []
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(getsource(cls)).readline):
        text = token.string.removeprefix("#").strip()
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            above.append(text)
        elif token.type == tokenize.COMMENT and name:
            found[name] = " ".join([*filter(None, [found.get(name, "")]), text])
        elif token.type == tokenize.NAME and re.match(rf"    {token.string}: ", token.line):
            name = token.string
            if name not in found:
                found[name] = " ".join(above)
            above = []
    return found


def settings_of(cls: type, path: str = "") -> Iterator[tuple[str, type, Field[Any], Any]]:
    """Every setting below a dataclass: its key, the dataclass, the field and its type."""
    hints = typing.get_type_hints(cls)
    for found in fields(cls):
        key, hint = path + found.name, hints[found.name]
        if is_dataclass(hint):
            yield from settings_of(typing.cast("type", hint), f"{key}.")
        else:
            yield key, cls, found, hint


def default_of(found: Field[Any]) -> str:
    """A default as TOML has it."""
    value = found.default if found.default_factory is MISSING else found.default_factory()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{item}"' if isinstance(item, str) else str(item) for item in value) + "]"
    return str(value)


def allowed_of(found: Field[Any], hint: Any) -> str:
    """What a setting may be, in Markdown."""
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    kinds: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}
    origins: dict[Any, str] = {tuple: "list", dict: "table"}
    kind = kinds.get(hint) or origins.get(typing.get_origin(hint), "")
    rule = found.metadata.get("rule", "")
    return rule if rule.startswith("a list") else ", ".join(filter(None, [kind, rule]))
