"""How values that hold records, or what was made of them, show themselves: by shapes and counts, never by a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

FEW = 8  # entries of a table that are named one by one


def in_outline(value: Any) -> str:
    """The ``__repr__`` of a dataclass with tensors or arrays: whoever prints it by chance, or logs it, shows no record.

    ::

        Records(x=uint8 (60, 1, 28, 28), y=int64 (60,), group=int64 (60,), subject=None, ...)
    """
    parts = (f"{each.name}={_part(getattr(value, each.name, None))}" for each in fields(value))
    return f"{type(value).__name__}({', '.join(parts)})"


def _part(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if is_dataclass(value) and not isinstance(value, type):
        return in_outline(value)
    if isinstance(value, dict) and len(value) <= FEW:
        return "{" + ", ".join(f"{key}: {_part(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Mapping):
        return f"{len(value)} entries"
    if isinstance(value, tuple | list | set | frozenset):
        kinds = {type(each).__name__ for each in value}
        return f"{len(value)} x {kinds.pop() if len(kinds) == 1 else 'several kinds'}" if value else "none"
    return repr(value) if value is None or isinstance(value, str | int | float | Enum) else type(value).__name__
