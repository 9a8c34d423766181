"""The one Flower app that fedloom is: a description without code, which every machine makes for itself, byte by byte.

A server names an app with every run. A silo compares that name with its own and fetches nothing: what an app brings,
wants installed or wants started is never looked at.
"""

from __future__ import annotations

import io
import zipfile
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.supercore.run import Run

NAME, VERSION = "fedloom/fedloom-app", "1.0.0"
DESCRIPTION = """\
[project]
name = "fedloom-app"
version = "1.0.0"
description = "Points to what every machine has installed itself."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedloom"

[tool.flwr.app.components]
serverapp = "fedloom.deployment.server_app:main"
clientapp = "fedloom.deployment.node:main"

[tool.flwr.app.config]
submission = ""
"""
DATE = (1980, 1, 1, 0, 0, 0)
UNIX = 3


@cache
def archive() -> bytes:
    """The app as Flower wants it: nothing is compressed, so that all machines make the same bytes."""
    content = DESCRIPTION.encode()
    listing = f"pyproject.toml,{sha256(content).hexdigest()},{8 * len(content)}\n".encode()
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_STORED) as files:
        for name, data in (("pyproject.toml", content), (".info/CONTENT", listing)):
            entry = zipfile.ZipInfo(name, DATE)
            entry.create_system = UNIX
            files.writestr(entry, data)
    return found.getvalue()


def digest() -> str:
    """By which Flower names it."""
    return sha256(archive()).hexdigest()


def objection(run: Run) -> str:
    """Why a silo does nothing for a run; empty where it is one of fedloom's own."""
    kind = run.primary_task_type
    if kind != "flwr-serverapp":
        return f"the server sent a task of a run that is a '{kind}'; this silo answers fedloom's own runs alone"
    if (run.fab_id, run.fab_version, run.fab_hash) != (NAME, VERSION, digest()):
        return (
            f"the server sent a task of the app '{run.fab_id}' {run.fab_version} ({run.fab_hash[:12]}); this silo "
            f"runs no foreign code, and answers '{NAME}' {VERSION} ({digest()[:12]}) alone"
        )
    return ""
