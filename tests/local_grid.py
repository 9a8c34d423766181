"""A whole federation in one process: Flower's messages, fedloom's server loop and silos, no server and no sockets."""

from __future__ import annotations

import copy
import math
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import Error, Message
from flwr.supercore.task_identity import TaskIdentity

from fedloom.config import Config
from fedloom.deployment.flower.grid_wire import FlowerWire
from fedloom.deployment.flower.messages import answered, frame_of
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.rounds import Event, RemoteEngine
from fedloom.engines.remote.rules import RoundRules
from fedloom.engines.remote.silo import Agreement, Grant, Screening, SiloService
from fedloom.experiment import Experiment, Observer, Run
from fedloom.federation.records import Federation
from fedloom.federation.remote import RemoteSilo
from fedloom.runs.folder import RunFolder

Handler = Callable[[Frame], Frame]
PROMPT = RoundRules(deadline=120.0, grace=0.2, minimum=1, extensions=0, attempts=2)


class LocalGrid:
    """What fedloom uses of Flower's grid; every message is copied, and answered in a thread of its own.

    A silo answers one after the other, as its worker does.
    """

    def __init__(self, handlers: dict[str, Handler]) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # messages cannot be made without
        self.handlers = dict(handlers)
        self.offline: set[str] = set()
        self._nodes = {1000 + number: name for number, name in enumerate(handlers)}
        self._replies: dict[str, Message] = {}
        self._turns = {name: threading.Lock() for name in handlers}

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=n, name=name) for n, name in self._nodes.items() if name not in self.offline]

    def push_messages(self, messages: list[Message]) -> list[str]:
        numbers = []
        for message in messages:
            numbers.append(uuid.uuid4().hex)
            message.metadata.__dict__["_message_id"] = numbers[-1]
            threading.Thread(target=self._answer, args=(numbers[-1], copy.deepcopy(message)), daemon=True).start()
        return numbers

    def pull_messages(self, numbers: list[str]) -> list[Message]:
        return [self._replies.pop(number) for number in numbers if number in self._replies]

    def _answer(self, number: str, message: Message) -> None:
        name = self._nodes[message.metadata.dst_node_id]
        try:
            with self._turns[name]:
                reply = answered(self.handlers[name](frame_of(message)), message)
        except Exception as error:
            reply = Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)
        self._replies[number] = copy.deepcopy(reply)


def remote(federation: Federation, at: int | None = None) -> Federation:
    """A federation as its server sees it, or as the silo ``at`` does, which has its own records."""
    silos = tuple(
        silo if number == at else RemoteSilo.of(silo.name, silo.groups, federation.shape, federation.modality.name)
        for number, silo in enumerate(federation.silos)
    )
    return replace(federation, silos=silos, test=federation.test.take(torch.tensor([], dtype=torch.int64)))


def agree(*_: Any) -> Grant:
    """To everything, with noise that can be repeated."""
    return Grant(math.inf, repeatable=True)


@dataclass
class Deployment:
    """Silos and a server in folders under ``path``."""

    path: Path
    config: Config
    federation: Federation
    rules: RoundRules = PROMPT
    agreement: Agreement = agree
    screening: Screening = lambda _: None
    events: list[Event] = field(default_factory=list)
    declared: bool = True  # how many records each silo has at most, which is the truth

    def __post_init__(self) -> None:
        self.grid = LocalGrid({silo.name: self.service(i).answer for i, silo in enumerate(self.federation.silos)})

    def home(self, silo: int) -> Path:
        return self.path / self.federation.silos[silo].name

    def service(self, silo: int) -> SiloService:
        self.home(silo).mkdir(parents=True, exist_ok=True)
        return SiloService(self.home(silo), remote(self.federation, silo), silo, self.screening, self.agreement)

    def run(self, folder: str = "server", name: str = "run-1", observer: Observer | None = None) -> Run:
        """From the start, or on from the newest checkpoint where the folder is there."""
        torch.set_num_threads(1)
        path, experiment = self.path / folder, Experiment.of(self.config, remote(self.federation))
        wire = FlowerWire(self.grid, poll=0.005)
        records = {silo.name: len(silo) for silo in self.federation.silos} if self.declared else {}
        engine = RemoteEngine(experiment.trainer, name, wire, self.rules, records, self.events.append)
        if path.is_dir():
            return experiment.resume(RunFolder.open(path), observer=observer, engine=engine)
        return experiment.run(path, observer=observer, engine=engine)

    def told(self, kind: str) -> list[tuple[int, str]]:
        """Rounds and silos of all events of a kind."""
        return [(event.round, event.silo) for event in self.events if event.event == kind]

    def reasons(self, kind: str) -> list[str]:
        return [event.reason for event in self.events if event.event == kind]
