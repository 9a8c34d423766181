"""What a silo's node answers to tasks that it does not hand to the worker."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedloom.deployment import node
from fedloom.deployment.node import Connection, LostError, called, reply_to
from fedloom.engines.flower.frames import Frame


@pytest.fixture
def envelope() -> Message:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # messages cannot be made without
    return Message(RecordDict({"other": ConfigRecord({"x": 1})}), 7, MessageType.TRAIN, ttl=60.0)


class Told(Connection):
    """A server whose task is as the test says."""

    def __init__(self, reason: str, content: Callable[[], Message]) -> None:
        self._reason, self._make, self.fetched = reason, content, 0

    def objection(self, _: Message) -> str:  # type: ignore[override]
        return self._reason

    def content(self, *_: object) -> Message:  # type: ignore[override]
        self.fetched += 1
        return self._make()


def nobody(_: Frame) -> Frame:
    raise AssertionError("nobody is asked")


def test_nothing_of_a_foreign_task_is_fetched(envelope: Message, caplog: pytest.LogCaptureFixture) -> None:
    connection = Told("not fedloom's", lambda: envelope)
    reply = reply_to(connection, envelope, None, nobody)
    assert reply.error.reason == "not fedloom's"
    assert connection.fetched == 0
    assert [record.getMessage() for record in caplog.records] == ["refused: not fedloom's"]


def failing(error: Exception) -> Callable[[], Message]:
    def content() -> Message:
        raise error

    return content


def test_a_task_that_cannot_be_read_is_answered(envelope: Message) -> None:
    reply = reply_to(Told("", failing(KeyError("secret"))), envelope, None, nobody)
    assert reply.error.reason == "the task cannot be read (KeyError)"
    reply = reply_to(Told("", lambda: envelope), envelope, None, nobody)
    assert "a message holds the records ['other']" in reply.error.reason


@pytest.mark.parametrize("error", [LostError("gone"), httpx.ConnectError("gone")])
def test_a_lost_connection_is_no_answer(envelope: Message, error: Exception) -> None:
    with pytest.raises(type(error)):
        reply_to(Told("", failing(error)), envelope, None, nobody)


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(node.time, "sleep", pauses.append)
    request = httpx.Request("POST", "https://x")
    statuses = [500, 503, 200]

    def call(_: object) -> str:
        status = statuses.pop(0)
        if status != 200:
            raise httpx.HTTPStatusError("no", request=request, response=httpx.Response(status))
        return "answer"

    assert called(call, None) == "answer"
    assert pauses == [1.0, 2.0]
    statuses[:] = [401]
    with pytest.raises(httpx.HTTPStatusError):
        called(call, None)
    assert len(pauses) == 2
    statuses[:] = [500] * node.TRIES
    with pytest.raises(LostError, match="the server is busy"):
        called(call, None)
