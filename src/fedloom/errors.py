"""What a person may have got wrong: one sentence, exit code 2, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

SHIPPED = Path(__file__).parent / "docs"  # put there when a wheel is built; a checkout has its own


class FedloomError(Exception):
    """A mistake or mishap that one clear sentence explains; the command line prints it and exits with 2."""

    page: ClassVar[str] = ""  # of docs/, where it is explained; that of the command unless told


class ConfigError(FedloomError):
    """A setting is unknown, has the wrong type, or does not fit the others."""


class NoMechanismError(ConfigError):
    """Privacy is asked for by its settings, and no mechanism would give any."""

    page = "privacy.md"


class DataError(FedloomError):
    """A data set is missing, unreadable, or not what it was said to be."""

    page = "how-to/own-data.md"


class RunFolderError(FedloomError):
    """A run folder is missing, foreign, damaged, in the way, or cannot be written."""


class EgressError(FedloomError):
    """A silo was about to send something that its sharing plan does not declare."""

    page = "architecture.md"


class MissingExtraError(FedloomError):
    """An optional package is not installed; the sentence names the extra that brings it."""


class FedloomWarning(UserWarning):
    """A result stands, but a reader should know why it may mislead."""


def page_path(page: str) -> str:
    """Where a page of the documentation can be read: in the installed package, or under the checkout's root."""
    shipped = SHIPPED / page
    return str(shipped) if shipped.is_file() else f"docs/{page}"


def unknown(kind: str, name: str, allowed: Iterable[str], listed_by: str = "") -> str:
    """Say that ``name`` is no ``kind``, with the nearest valid name first, then all, or the command that lists them.

    >>> unknown("prior", "wavy", ["identical", "wave"])
    "unknown prior 'wavy'; did you mean 'wave'? (allowed: identical, wave)"
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    listing = listed_by or ", ".join(names) or "none"
    return f"unknown {kind} '{name}'{hint} (allowed: {listing})"
