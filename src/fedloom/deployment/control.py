"""What a coordinator does at the SuperLink: see who is there, admit, start and stop runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedloom.deployment.apps import archive, digest
from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.submissions import Submission
from fedloom.errors import FedloomError, MissingExtraError

try:
    import httpx
except ModuleNotFoundError as error:
    raise MissingExtraError(f"a federation needs the package '{error.name}'; pip install 'fedloom[flower]'") from error

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

ANSWERING = 30.0  # seconds that a call may take
TAKEN_BACK = "unregistered"
GONE = "finished: its server was started again"


@dataclass(frozen=True)
class Node:
    """A silo's key as the SuperLink knows it."""

    number: int
    silo: str
    key: bytes  # PEM
    status: str  # registered, online, offline, unregistered


@dataclass(frozen=True)
class Control:
    """Calls through the inner door of a server's SuperLink."""

    home: ServerDirectory

    @property
    def answers(self) -> bool:
        """Whether the SuperLink is there."""
        socket = self.home.door.socket
        if socket is None:
            return False
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=ANSWERING) as client:
                return client.get("http://superlink/health").is_success
        except httpx.HTTPError:
            return False

    def nodes(self) -> list[Node]:
        """All nodes that the SuperLink knows, with their keys."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with self._client("tell whom it knows") as client:
            found = client.ListNodes(ListNodesRequest()).nodes_info
        return [Node(node.node_id, node.name, node.public_key, node.status) for node in found]

    def register(self, silo: str, key: bytes) -> None:
        """Let the holder of a key join under a name."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        with self._client(f"register silo '{silo}'") as client:
            client.RegisterNode(RegisterNodeRequest(public_key=key, name=silo))

    def unregister(self, node: Node) -> None:
        """Let a silo's node no longer join."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        with self._client(f"unregister silo '{node.silo}'") as client:
            client.UnregisterNode(UnregisterNodeRequest(node_id=node.number))

    def start(self, submission: str) -> int:
        """Begin a run for a submission; returns Flower's number for it."""
        from flwr.common.serde import user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.proto.fab_pb2 import Fab

        fab = Fab(hash_str=digest(), content=archive())
        chosen = user_config_to_proto({"submission": submission})
        with self._client("start a run") as client:
            return int(client.StartRun(StartRunRequest(fab=fab, override_config=chosen)).run_id)

    def ending(self, number: int) -> str:
        """Flower's word for how a run ended; empty while it has not."""
        from flwr.proto.control_pb2 import ListRunsRequest

        with self._client("tell how a run is") as client:
            try:
                found = client.ListRuns(ListRunsRequest(run_id=number)).run_dict
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500:  # it keeps runs in memory, and does not know this one
                    return GONE
                raise
        status = found[number].status if number in found else None
        if status is None:
            return GONE
        return f"finished: {status.sub_status}" if status.status == "finished" else ""

    def stop(self, number: int) -> None:
        """End a run that the SuperLink has not ended itself."""
        from flwr.proto.control_pb2 import StopRunRequest

        with self._client("stop the run") as client:
            client.StopRun(StopRunRequest(run_id=number))

    @contextmanager
    def _client(self, purpose: str) -> Iterator[ControlHttpClient]:
        from flwr.supercore.control import ControlHttpClient

        from fedloom.deployment.door import through

        socket = self.home.door.socket
        if socket is None:
            raise FedloomError(f"no server runs for {self.home.path}: it cannot {purpose}")
        try:
            with through(ControlHttpClient, socket, "flwr CLI", ANSWERING) as client:
                yield client
        except httpx.HTTPError as error:
            said = error.response.text if isinstance(error, httpx.HTTPStatusError) else str(error)
            raise FedloomError(f"the SuperLink does not {purpose}: {said or error}") from error


@dataclass
class FlowerConductor:
    """The contract of a conductor kept through those calls."""

    home: ServerDirectory
    _number: int = 0  # Flower's, of the run that was started

    @property
    def _control(self) -> Control:
        return Control(self.home)

    @property
    def answers(self) -> bool:
        """Whether the SuperLink is there."""
        return self._control.answers

    def silos(self) -> dict[str, dict[str, Any]]:
        """As Flower calls it; on what device a silo trains is not told by this wire."""
        nodes = self._control.nodes()
        return {node.silo: {"there": node.status, "device": ""} for node in nodes if node.status != TAKEN_BACK}

    def start(self, submission: Submission) -> None:
        """As a run of Flower's."""
        self._number = self._control.start(submission.number)

    def ending(self) -> str:
        """Flower's word for how the run ended; empty while it has not, or while nobody can say."""
        try:
            return self._control.ending(self._number)
        except FedloomError:  # a SuperLink that is busy, or is just being started again
            return ""

    def stop(self) -> None:
        """At Flower's side."""
        self._control.stop(self._number)
