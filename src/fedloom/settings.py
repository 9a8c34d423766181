"""Plain settings, as TOML holds them: read, put on top of one another, and checked against a dataclass.

What is wrong with a value is said in one sentence that names the field, the value and what is allowed; an unknown key
is refused with the nearest valid one.
"""

from __future__ import annotations

import copy
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from fedloom.errors import ConfigError, unknown

T = TypeVar("T")
Settings = dict[str, Any]
# Field metadata: a setting that came later. Where it has its default, an experiment is the one that it was before.
LATER: dict[str, Any] = {"later": True}


def at_least(low: float) -> dict[str, Any]:
    """Field metadata: the value may not be smaller than ``low``."""
    return {"check": lambda value: low <= value < math.inf, "rule": f"at least {low}"}


def between(low: float, high: float) -> dict[str, Any]:
    """Field metadata: the value is ``low``, ``high`` or lies between them."""
    return {"check": lambda value: low <= value <= high, "rule": f"at least {low} and at most {high}"}


def above(low: float) -> dict[str, Any]:
    """Field metadata: the value must be greater than ``low``."""
    return {"check": lambda value: low < value < math.inf, "rule": f"greater than {low}"}


def rate() -> dict[str, Any]:
    """Field metadata: the value lies in (0, 1]."""
    return {"check": lambda value: 0 < value <= 1, "rule": "greater than 0 and at most 1"}


def share() -> dict[str, Any]:
    """Field metadata: the value lies in [0, 1)."""
    return {"check": lambda value: 0 <= value < 1, "rule": "at least 0 and below 1"}


def portion() -> dict[str, Any]:
    """Field metadata: the value lies in [0, 1]."""
    return {"check": lambda value: 0 <= value <= 1, "rule": "at least 0 and at most 1"}


def all_positive() -> dict[str, Any]:
    """Field metadata: every item of the list is at least 1."""
    return {
        "check": lambda value: all(item >= 1 for item in value),
        "rule": "a list of numbers of at least 1",
    }


def the_rest() -> dict[str, Any]:
    """Field metadata: a dictionary of all keys of the table that are no other field's."""
    return {"rest": True}


def the_short() -> dict[str, Any]:
    """Field metadata: text in place of the whole table is this field's value."""
    return {"short": True}


def read_toml(path: Path) -> Settings:
    """What a TOML file holds."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> Settings:
    """Tables are merged key by key, but for those that take nothing of the one below.

    These are another method or merge with its own options, and privacy without a mechanism, which has no use for any.
    """
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        tables = isinstance(under, Mapping) and isinstance(value, Mapping) and not _stands_alone(key, value)
        merged[key] = layered(under, value) if tables else value  # type: ignore[arg-type]
    return merged


def _stands_alone(key: str, table: Mapping[str, Any]) -> bool:
    return (key in ("method", "merge") and "name" in table) or (key == "privacy" and table.get("mechanism") == "none")


def override(mapping: Mapping[str, Any], assignments: Sequence[str]) -> Settings:
    """Apply ``key.sub=value`` assignments; a value is read as TOML, and as text where it is not TOML."""
    tree: Settings = copy.deepcopy(dict(mapping))
    assigned = [_assigned(assignment) for assignment in assignments]
    if ("privacy.mechanism", "none") in assigned:
        tree.pop("privacy", None)
    for assignment, (key, value) in zip(assignments, assigned, strict=True):
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ConfigError(f"override '{assignment}': {parent} is a single value, not a table")
            node = child
        node[leaf] = value
    return tree


def _assigned(assignment: str) -> tuple[str, Any]:
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override '{assignment}' must look like key.sub=value")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text


def parse(cls: type[T], mapping: Mapping[str, Any], path: str = "", beside: Sequence[str] = ()) -> T:
    """Build a configuration dataclass from plain values; every complaint names the field, the value and the rule.

    ``beside`` are keys of the same table that somebody else has read already.
    """
    known = {f.name: f for f in fields(cls) if "rest" not in f.metadata}  # type: ignore[arg-type]
    rest = [f.name for f in fields(cls) if "rest" in f.metadata]  # type: ignore[arg-type]
    hints = _hints(typing.cast("Any", cls))
    values: Settings = {name: {} for name in rest}
    for key, value in mapping.items():
        where = f"{path}.{key}" if path else key
        if key not in known:
            if not rest:
                allowed = (f"{path}.{name}" if path else name for name in (*known, *beside))
                raise ConfigError(unknown("key", where, allowed))
            values[rest[0]][key] = value
            continue
        values[key] = _convert(hints[key], value, where)
        check, rule = known[key].metadata.get("check"), known[key].metadata.get("rule")
        if check is not None and not check(values[key]):
            raise ConfigError(f"{where} = {value!r} must be {rule}")
    return cls(**values)


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, which take longer to find than a file to read."""
    return typing.get_type_hints(cls)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Check one value against its type hint; whole numbers pass as floats, lists as tuples."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        short = next((f.name for f in fields(hint) if "short" in f.metadata), None)
        if isinstance(value, str) and short:
            value = {short: value}
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{where} = {value!r} must be a table of settings, such as {where}.{fields(hint)[0].name}"
            )
        return parse(typing.cast("type[Any]", hint), value, where)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{where}: " + unknown("value", str(value), map(str, arguments)))
        return value
    if origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_convert(arguments[0], item, where) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {key: _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and type(value) is hint:
        return value
    raise ConfigError(f"{where} = {value!r} must be {_describe(hint)}")


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    origin = typing.get_origin(hint)
    if origin is tuple:
        return f"a list, each item {_describe(typing.get_args(hint)[0])}"
    return "a table" if origin is dict else names.get(hint, str(hint))


def leave_out_later_defaults(settings: Any, tree: Settings) -> None:
    """Drop from a tree of plain values what came later and says nothing new."""
    usual = type(settings)()
    for each in (found for found in fields(settings) if found.name in tree):
        value = getattr(settings, each.name)
        if "later" in each.metadata and value == getattr(usual, each.name):
            del tree[each.name]
        elif is_dataclass(value):
            leave_out_later_defaults(value, tree[each.name])
