"""A task at a silo, from when it is agreed to: what trains it, and what of it decides what comes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from fedloom.engines.base import Task
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.grants import Grant
from fedloom.engines.remote.round_store import RoundStore
from fedloom.engines.remote.work import Order
from fedloom.engines.training import Trainer
from fedloom.outline import in_outline
from fedloom.privacy.accounting import Event, NoGuarantee
from fedloom.privacy.silo_privacy import REPEATABLE, SiloPrivacy
from fedloom.sharing.plan import BlockKey, Tensors


@dataclass(frozen=True, eq=False)
class Prepared:
    """An experiment at this silo, ready to train: it stays loaded from round to round."""

    __repr__ = in_outline

    trainer: Trainer
    privacy: SiloPrivacy | None  # under DP-SGD
    grant: Grant
    size: int  # bytes of the silo's model
    expected: Mapping[BlockKey, Tensors]  # the form of what comes down with every task

    def events(self, round: int) -> Mapping[str, Event]:
        """What a round releases, as it is charged."""
        events = self.privacy.events(round) if self.privacy else {}
        return dict.fromkeys(events, NoGuarantee(REPEATABLE)) if self.grant.repeatable else events


@dataclass(frozen=True, eq=False)
class Assignment:
    """A task that this silo agrees to."""

    __repr__ = in_outline

    order: Order
    prepared: Prepared
    task: Task
    digest: str  # of all that determines what comes of it
    round_store: RoundStore


def digest_of(frame: Frame) -> str:
    """All of a task that determines what comes of it."""
    header = {key: value for key, value in frame.header.items() if key != "settled"}
    return sha256(f"{json.dumps(header, sort_keys=True)}/{frame.sha256}".encode()).hexdigest()
