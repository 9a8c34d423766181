"""Frames in Flower's envelopes: the header as a record of text, every part as an array of bytes.

Flower stores arrays by their content, so a block that goes to many silos is uploaded once.
"""

from __future__ import annotations

import json

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedloom.engines.remote.frames import Frame
from fedloom.errors import FedloomError

HEADER, PARTS = "header", "parts"


def content_of(frame: Frame) -> RecordDict:
    """A frame as the content of a message."""
    arrays = {name: Array("uint8", (len(part),), "bytes", part) for name, part in frame.parts.items()}
    return RecordDict({HEADER: ConfigRecord({"json": json.dumps(dict(frame.header))}), PARTS: ArrayRecord(arrays)})


def frame_of(message: Message) -> Frame:
    """The frame in a message; whatever else it may hold is refused."""
    content = message.content
    if set(content) != {HEADER, PARTS}:
        raise FedloomError(f"a message holds the records {sorted(content)}; {HEADER} and {PARTS} are allowed")
    try:
        header = json.loads(str(content.config_records[HEADER]["json"]))
        arrays = content.array_records[PARTS]
        return Frame(dict(header), {name: array.data for name, array in arrays.items()})
    except (KeyError, ValueError, TypeError) as error:
        raise FedloomError(f"a message is not one of fedloom's: {error}") from error


def asked(frame: Frame, node: int, group: str, ttl: float) -> Message:
    """A task on its way to a silo's node."""
    return Message(content=content_of(frame), dst_node_id=node, message_type=MessageType.TRAIN, group_id=group, ttl=ttl)


def answered(frame: Frame, question: Message) -> Message:
    """The answer to a task."""
    return Message(content=content_of(frame), reply_to=question)
