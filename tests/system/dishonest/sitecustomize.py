"""Makes a silo's worker do wrong, once for each [round, damage] in the file that DAMAGES names: for tests alone.

Python imports a module of this name before all others, where its folder is in PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable, Collection
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.engines.remote.frames import Frame

PLAN = Path(os.environ["DAMAGES"])
UNFINISHED = "unfinished"  # it dies when an update is trained and paid for, before that is noted
send_bytes = Connection.send_bytes


def taken(names: Collection[str], round: int | None = None) -> str:
    """The first damage of such a name that is due, which is then done with."""
    plan = json.loads(PLAN.read_text())
    for entry in plan:
        if entry[1] in names and round in (None, entry[0]):
            plan.remove(entry)
            PLAN.write_text(json.dumps(plan))
            return str(entry[1])
    return ""


def changed(change: Callable[[Tensor], Tensor], frame: Frame) -> bytes:
    """An update in which every tensor is another."""
    from fedloom.sharing.codec import packed, unpacked

    parts = {name: packed({k: change(t) for k, t in unpacked(p, name).items()}) for name, p in frame.parts.items()}
    return type(frame)(frame.header, parts).to_bytes()


def with_records(frame: Frame) -> bytes:
    """An update with a block that nobody has agreed to."""
    import torch

    from fedloom.sharing.codec import packed

    stolen = packed({"x": torch.zeros(4)})
    return type(frame)(frame.header, {**frame.parts, "blocks/records@all": stolen}).to_bytes()


def stop_by(number: int, frame: Frame) -> bytes:
    """An update that is kept, and not sent before the process may go on."""
    os.kill(os.getpid(), number)
    return frame.to_bytes()


DAMAGES: dict[str, Callable[[Frame], bytes]] = {
    "nan": partial(changed, lambda tensor: tensor * float("nan")),
    "shapes": partial(changed, lambda tensor: tensor.repeat(2, *[1] * (tensor.ndim - 1))),
    "norms": partial(changed, lambda tensor: 10 * tensor),
    "undeclared": with_records,
    "nonsense": lambda _: b"nonsense",  # which the ClientApp cannot read: it raises
    "killed": partial(stop_by, signal.SIGKILL),
    "halted": partial(stop_by, signal.SIGSTOP),
}


def send(self: Connection, data: bytes) -> None:
    """What stands in for the connection's own."""
    from fedloom.engines.remote.frames import Frame

    frame = Frame.of_bytes(data)
    name = taken(DAMAGES, frame.header["round"]) if frame.kind == "update" else ""
    send_bytes(self, DAMAGES[name](frame) if name else data)


class Dying(sqlite3.Connection):
    """A ledger's connection."""

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement.startswith("INSERT INTO finished") and taken([UNFINISHED]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(statement, *values)


Connection.send_bytes = send  # type: ignore[method-assign, assignment]
sqlite3.connect = partial(sqlite3.connect, factory=Dying)  # type: ignore[assignment]
