"""A silo's audit log around its answers: what it was asked, and what it makes of it, before that leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.work import FAILED, REFUSED, failure
from fedloom.errors import FedloomError
from fedloom.operations.trail import Deed, Trail

log = logging.getLogger(__name__)
LENGTH = 500  # characters of what somebody else wrote
ENDINGS: Mapping[str, Deed] = {REFUSED: "refused", FAILED: "failed"}


def recorded(trail: Trail, frame: Frame, answer: Callable[[Frame], Frame]) -> Frame:
    """An answer that its audit log tells of; without the lines nothing is done, and nothing leaves."""
    asked = asked_in(frame)
    try:
        trail.note("asked", asked, durable=False)  # until the next line that is: nothing leaves before
        reply = answer(frame)
        if ending := ENDINGS.get(reply.kind):
            trail.note(ending, asked | {"reason": str(reply.header.get("reason", ""))[:LENGTH]})
        else:
            trail.note("sent", asked | {"sha256": reply.sha256, "bytes": reply.size})
        return reply
    except FedloomError as error:
        log.error("the audit log cannot be kept: %s", error)
        return failure("the silo cannot keep its audit log; its own log says why")


def asked_in(frame: Frame) -> dict[str, Any]:
    """What a task says of itself, in short: nothing of it is believed yet."""
    header, number = frame.header, frame.header.get("round")
    facts: dict[str, Any] = {"kind": str(header.get("kind", ""))[:LENGTH], "run": str(header.get("run", ""))[:LENGTH]}
    facts |= {"round": number if type(number) is int else 0}
    if "turn" in header:
        facts |= {"turn": str(header["turn"])[:LENGTH]}
    experiment = str(header.get("experiment", ""))
    return facts | {"experiment": sha256(experiment.encode(errors="replace")).hexdigest()} if experiment else facts
