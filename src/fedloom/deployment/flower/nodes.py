"""Which silo is at which node: Flower's register says so where nodes have keys; else each node is asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Message, MessageType

from fedloom.deployment.flower.grid_wire import FlowerGrid
from fedloom.deployment.flower.messages import content_of, frame_of
from fedloom.engines.remote.frames import Frame
from fedloom.errors import FedloomError

log = logging.getLogger(__name__)
SILO = "silo"  # the question, and the answer's kind
AGAIN = 60.0  # seconds after which a node that has not said who it is, is asked again


def name_frame(silo: str) -> Frame:
    """A node's answer to the question who it is."""
    return Frame({"kind": SILO, "silo": silo})


@dataclass(frozen=True)
class NamedNode:
    """A node of a silo."""

    node_id: int
    name: str


class KnownNodes:
    """A grid whose nodes have the names of silos; those of others, or of nobody, are left out."""

    def __init__(self, grid: FlowerGrid, silos: Container[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._grid, self._silos, self._clock = grid, silos, clock
        self._names: dict[int, str] = {}
        self._asked: dict[str, int] = {}  # by the number of the message
        self._when: dict[int, float] = {}

    def push_messages(self, messages: Sequence[Message]) -> Any:
        """As the grid does."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Sequence[str]) -> Any:
        """As the grid does."""
        return self._grid.pull_messages(message_ids)

    def get_nodes(self) -> list[NamedNode]:
        """Those that are there and known; two that say the same are one silo too many, and neither is believed."""
        there = {node.node_id: str(node.name) for node in self._grid.get_nodes()}
        self._ask([node for node, name in there.items() if not name and node not in self._names])
        self._listen()
        named = {node: name or self._names.get(node, "") for node, name in there.items()}
        return list(self._believed({node: name for node, name in named.items() if name in self._silos}))

    def _believed(self, named: dict[int, str]) -> Iterator[NamedNode]:
        names = list(named.values())
        for node, name in named.items():
            if names.count(name) == 1:
                yield NamedNode(node, name)
            else:
                log.warning("%s nodes say that they are silo '%s', and none is asked", names.count(name), name)

    def _ask(self, nodes: Sequence[int]) -> None:
        now = self._clock()
        due = [node for node in nodes if now - self._when.get(node, -AGAIN) >= AGAIN]
        if not due:
            return
        question = Frame({"kind": SILO})
        messages = [
            Message(content=content_of(question), dst_node_id=node, message_type=MessageType.QUERY, ttl=AGAIN)
            for node in due
        ]
        self._when.update(dict.fromkeys(due, now))
        for node, number in zip(due, self._grid.push_messages(messages), strict=True):
            if number:
                self._asked[number] = node

    def _listen(self) -> None:
        """Replies are told apart by what they answer: those that Flower makes itself do not say whose they are."""
        if not self._asked:
            return
        for reply in self._grid.pull_messages(list(self._asked)):
            node = self._asked.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            try:
                if reply.has_error():
                    raise FedloomError(str(reply.error.reason))
                self._names[node] = str(frame_of(reply).header.get(SILO, ""))
            except FedloomError as error:
                log.warning("node %s does not say which silo it is: %s", node, error)
                self._names.pop(node, None)
