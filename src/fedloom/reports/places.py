"""Names of files without their folders: a page that is mailed tells nobody whose machine it was made on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from fedloom.runs.folder import RunFolder

# From the root of a machine, or from somebody's home, up to the name that stays.
FOLDERS = re.compile(r"(?<![\w:/.<>~])~?/(?:[^/\s'\"<>]+/)+")


def parents_of(folder: RunFolder) -> list[str]:
    """The folders of a run and of its data, the longest first."""
    data = folder.config.data
    given = [folder.path, *(Path(path) for path in (data.path, data.outliers.path) if path)]
    found = {str(path.parent) for one in given for path in (one, one.resolve())}
    return sorted((f"{parent}/" for parent in found if parent not in (".", "/")), key=len, reverse=True)


def without_places(value: Any, parents: Sequence[str]) -> Any:
    """The same value, its texts without these folders, and without any others from a root on."""
    if isinstance(value, str):
        for parent in parents:
            value = value.replace(parent, "")
        return FOLDERS.sub("", value)
    if isinstance(value, Mapping):
        return {key: without_places(item, parents) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_places(item, parents) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: without_places(item, parents) for name, item in vars(value).items()})
    return value
