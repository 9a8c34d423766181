"""What crosses the wire is read with suspicion: any bytes are one letter within its bounds, or a sentence."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.deployment.direct.letters import (
    PARTS,
    TEXT,
    Letter,
    Piece,
    WireError,
    content_of_text,
    sizes_of,
    text_of,
)
from fedloom.engines.remote.frames import Frame
from fedloom.errors import FedloomError

CASES = settings(max_examples=int(os.environ.get("FEDLOOM_FUZZ", "150")), deadline=None)  # more: a longer look
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
frames = st.builds(
    Frame,
    st.dictionaries(st.text(), plain, max_size=4),
    st.dictionaries(st.text(min_size=1, max_size=40), st.binary(max_size=64), max_size=4),
)
letters = st.builds(Letter.order, st.text(), frames, st.integers(0, 2**40))


@CASES
@given(letters)
def test_a_letter_is_read_as_it_was_written(letter: Letter) -> None:
    assert Letter.of_bytes(letter.to_bytes()) == letter


@CASES
@given(frames)
def test_a_frame_is_read_as_it_was_written(frame: Frame) -> None:
    found = Frame.of_bytes(frame.to_bytes())
    assert (found.header, found.parts, found.sha256) == (frame.header, frame.parts, frame.sha256)


@CASES
@given(st.binary(max_size=400))
def test_any_bytes_are_a_letter_or_a_sentence(data: bytes) -> None:
    with pytest.raises(WireError):  # no letter comes about by chance: its number alone has 64 digits
        Letter.of_bytes(data)
    with pytest.raises(FedloomError):
        Frame.of_bytes(data)


@CASES
@given(letters, st.data())
def test_a_damaged_letter_is_another_letter_or_a_sentence(letter: Letter, data: st.DataObject) -> None:
    text = bytearray(letter.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        kind = data.draw(st.sampled_from(("flip", "cut", "double")))
        if kind == "flip":
            text[place] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del text[place:]
            text += b" "
        else:
            text[place:place] = text[: place + 1]
    try:
        found = Letter.of_bytes(bytes(text))
    except WireError:
        return
    assert Letter.of_bytes(found.to_bytes()) == found
    assert all(len(piece.sha256) == 64 and piece.size >= 0 for piece in found.parts)


@CASES
@given(frames, st.data())
def test_a_damaged_frame_is_another_frame_or_a_sentence(frame: Frame, data: st.DataObject) -> None:
    text = bytearray(frame.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = Frame.of_bytes(bytes(text))
    except FedloomError:
        return
    assert found.size <= len(text)


WHOLE = json.loads(Letter.order("north", Frame({"kind": "task"}, {"x": b"1"}), 7).to_bytes())
DIGEST = WHOLE["parts"][0][1]


@pytest.mark.parametrize(
    "change",
    [
        {"number": "../../etc/passwd"},
        {"number": "a" * 63 + "/"},
        {"number": "A" * 64},
        {"number": 1},
        {"attempt": 0},
        {"attempt": True},
        {"attempt": "1"},
        {"limit": -1},
        {"limit": 2**41},
        {"limit": 1.5},
        {"header": []},
        {"header": None},
        {"parts": {}},
        {"parts": [["x", "../x", 1]]},
        {"parts": [["x", "/etc/passwd", 1]]},
        {"parts": [["x", DIGEST, -1]]},
        {"parts": [["x", DIGEST, 2**41]]},
        {"parts": [["x", DIGEST, True]]},
        {"parts": [["x", DIGEST]]},
        {"parts": [["", DIGEST, 1]]},
        {"parts": [["x" * 513, DIGEST, 1]]},
        {"parts": [["x", DIGEST, 1], ["x", DIGEST, 1]]},
        {"parts": [[str(number), DIGEST, 2**40] for number in range(2)]},
        {"parts": [[str(number), DIGEST, 0] for number in range(PARTS + 1)]},
        {"code": "import os"},
    ],
    ids=repr,
)
def test_what_no_letter_may_say_is_refused(change: dict[str, Any]) -> None:
    assert Letter.of_bytes(json.dumps(WHOLE).encode()).kind == "task"
    with pytest.raises(WireError):
        Letter.of_bytes(json.dumps({**WHOLE, **change}).encode())


def test_a_text_is_bounded_and_plain() -> None:
    with pytest.raises(WireError, match=f"{TEXT} are allowed"):
        content_of_text(b" " * (TEXT + 1))
    with pytest.raises(WireError, match=f"{TEXT} are allowed"):
        text_of({"x": "y" * TEXT})
    for data in (b"[" * 100_000, b'{"x": NaN}', b'{"x": Infinity}', b'{"x": 1}x', b"\xff"):
        with pytest.raises(WireError, match="this is no text of the wire"):
            content_of_text(data, x=float)
    with pytest.raises(WireError, match="two sizes"):
        sizes_of([Piece("a", DIGEST, 1), Piece("b", DIGEST, 2)])


def test_the_same_order_has_the_same_number_and_no_other() -> None:
    frame = Frame({"round": 1}, {"x": b"1"})
    number = Letter.order("north", frame, 1).number
    assert Letter.order("north", Frame({"round": 1}, {"x": b"1"}), 2).number == number
    others = (
        Letter.order("south", frame, 1),
        Letter.order("north", Frame({"round": 2}, {"x": b"1"}), 1),
        Letter.order("north", Frame({"round": 1}, {"x": b"2"}), 1),
        Letter.order("north", Frame({"round": 1}, {"y": b"1"}), 1),
    )
    assert len({number, *(other.number for other in others)}) == 5
