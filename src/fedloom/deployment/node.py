"""A silo's connection to the server: it takes tasks for the worker, one after the other, and brings the answers back.

It speaks with Flower's SuperLink as a SuperNode does, and is none. A SuperNode starts a process for every task, of a
kind and with code that the server chooses, and listens on the machine for that process. Here nothing is fetched,
unpacked, imported or started on a server's word and nothing listens: a task that is not fedloom's gets an error for an
answer, at once, and one that is goes to the silo's worker.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto, run_from_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedloom.deployment.apps import objection
from fedloom.deployment.directories import SiloDirectory
from fedloom.deployment.link import REFUSED, ask_worker
from fedloom.deployment.signing import Signatory
from fedloom.engines.flower.frames import Frame
from fedloom.engines.flower.messages import answered, frame_of
from fedloom.errors import FedloomError

log = logging.getLogger(__name__)
SOONEST, LATEST = 0.25, 2.0  # seconds between two looks for a task; soon after one the next is likely
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # seconds between tries to reach the server
GOES_BY = (500, 502, 503, 504)  # answers of a server that is busy, or is just being started again
TRIES = 20  # of a call that meets them
TURNED_AWAY = (
    "the server does not let this silo in: its key is not admitted, or it is still counted as joined "
    "(after a crash that takes a minute)"
)
NOT_TRUSTED = "the server's certificate is not one of this federation, or has expired"


class LostError(FedloomError):
    """The connection must be made anew."""


class TurnedAwayError(FedloomError):
    """The server knows no silo of this key, or knows it as joined."""


class Connection:
    """What one activation of the silo's key allows: tasks come, answers go, and the server hears that we are alive."""

    def __init__(self, client: FleetHttpClient, public_key: bytes) -> None:
        self._client, self._public_key = client, public_key

    def __enter__(self) -> Connection:
        asked = ActivateNodeRequest(public_key=self._public_key, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        try:
            self._node = Node(node_id=called(self._client.ActivateNode, asked).node_id)
        except httpx.HTTPStatusError as error:
            raise TurnedAwayError(TURNED_AWAY) from error
        self._heart = HeartbeatSender(self._beat)
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._heart.is_running:
            self._heart.stop()
        try:
            self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))
        except httpx.HTTPError as error:
            log.info("the server was not told that this silo leaves: %s", error)

    def _beat(self) -> bool:
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        try:
            return bool(self._client.SendNodeHeartbeat(request).success)
        except httpx.HTTPError:  # whoever looks for tasks meets it, too, and says so
            return False

    def task(self) -> tuple[Message, ObjectTree] | None:
        """The next one's envelope, if there is one; nothing of its content has been fetched."""
        found = called(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not found.messages_list:
            return None
        return message_from_proto(found.messages_list[0]), found.message_object_trees[0]

    def objection(self, envelope: Message) -> str:
        """Why this silo does nothing for it."""
        request = GetRunRequest(node=self._node, run_id=envelope.metadata.run_id)
        return objection(run_from_proto(called(self._client.GetRun, request).run))

    def content(self, envelope: Message, tree: ObjectTree) -> Message:
        """The whole message, pulled object by object."""
        run = envelope.metadata.run_id
        message: Message = pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(lambda asked: called(self._client.PullObject, asked), self._node, run),
            make_confirm_message_received_fn_protobuf(
                lambda asked: called(self._client.ConfirmMessageReceived, asked), self._node, run
            ),
            return_type=Message,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id  # its own name is not in it
        return message

    def answer(self, reply: Message, seconds: float) -> None:
        """Send a reply, whole or with an error that says why not."""
        run = reply.metadata.run_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(remove_content_from_message(reply) if reply.has_content() else reply)],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            due = called(self._client.PushMessages, request)
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(
                    lambda asked: called(self._client.PushObject, asked), self._node, run, due.session_id
                ),
                object_ids_to_push=set(due.objects_to_push),
            )


def called(call: Callable[[Any], Any], request: Any) -> Any:
    """A server's answer; one that is away or busy is asked again, and what keeps us from it is said once."""
    said = ""
    for number in range(TRIES):
        try:
            return call(request)
        except httpx.TransportError as error:
            trouble = NOT_TRUSTED if "CERTIFICATE_VERIFY_FAILED" in str(error) else f"no connection: {error}"
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in GOES_BY:
                raise
            trouble = f"the server is busy: {error}"
        if trouble != said:
            log.warning("%s", trouble)
            said = trouble
        time.sleep(PAUSES[min(number, len(PAUSES) - 1)])
    raise LostError(said)


def reply_to(connection: Connection, envelope: Message, tree: ObjectTree, ask: Callable[[Frame], Frame]) -> Message:
    """The silo's answer to a task, or an error."""
    code, reason = ErrorCode.INVALID_FAB, connection.objection(envelope)
    if reason:
        log.warning("%s%s", REFUSED, reason)
    else:
        try:
            message = connection.content(envelope, tree)
            return answered(ask(frame_of(message)), message)
        except (LostError, httpx.HTTPError):
            raise
        except Exception as error:  # whatever a server sends, it gets an answer, and the next task is looked for
            unforeseen = f"the task cannot be read ({type(error).__name__})"
            reason = str(error) if isinstance(error, FedloomError) else unforeseen
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            log.warning("no answer: %s", reason)
    return Message(Error(code=code, reason=reason), reply_to=envelope)


def serve(connection: Connection, ask: Callable[[Frame], Frame]) -> None:
    """One task after the other, until the connection is lost."""
    pause = SOONEST
    while True:
        found = connection.task()
        if found is None:
            time.sleep(pause)
            pause = min(LATEST, 1.2 * pause)
            continue
        start, pause = time.perf_counter(), SOONEST
        envelope, tree = found
        connection.answer(reply_to(connection, envelope, tree, ask), time.perf_counter() - start)


def main(folder: str, worker: str) -> None:
    """Stay connected until told to stop; whatever happens is said, and tried again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; 'join' stops this in order
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    home = SiloDirectory.open(Path(folder))
    signatory = Signatory.of(home)
    key = signatory.key
    assert isinstance(key, ec.EllipticCurvePrivateKey)  # Flower knows no other

    def ask(frame: Frame) -> Frame:
        return signatory.passed(frame, ask_worker(Path(worker), frame))

    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    identity: list[ProtobufClientInterceptor] = [version, NodeAuthHttpInterceptor(key, key.public_key())]
    address, authority = home.invitation.charter.address, str(home.path / "ca.crt")
    number = 0
    while True:
        try:
            with (
                FleetHttpClient.from_server_address(address, False, authority, identity) as client,
                Connection(client, public_key_to_bytes(key.public_key())) as connection,
            ):
                number = 0
                log.info("connected")
                serve(connection, ask)
        except (FedloomError, httpx.HTTPStatusError) as error:
            log.warning("%s", error)
        except Exception as error:  # a connection is made anew whatever went wrong with the last one
            log.exception("the connection was lost: %s", error)
        time.sleep(PAUSES[min(number, len(PAUSES) - 1)])
        number += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
