"""What every wire promises, held against each of them; what each adds is in tests of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.wire import Answer, Question, Wire
from rigs import RIGS, SILOS, Rig, standing_rig
from support import wait_for


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with standing_rig(request.param, tmp_path) as found:
        yield found


def echo(frame: Frame) -> Frame:
    """The parts as they came, each byte by itself turned over."""
    table = bytes(255 - number for number in range(256))
    return Frame(
        {"kind": "update", **frame.header}, {name: part.translate(table) for name, part in frame.parts.items()}
    )


def order(number: int = 1, size: int = 100) -> Frame:
    return Frame({"kind": "task", "round": number}, {"x": bytes([number]) * size, "empty": b""})


def asked(wire: Wire, *silos: str, number: int = 1, frame: Frame | None = None, patience: float = 20.0) -> None:
    online = wire.online()
    wire.ask([Question(silo, online[silo], number, frame or order(number)) for silo in silos], patience)


def answers(wire: Wire, count: int, seconds: float = 20.0) -> list[Answer]:
    """So many, in the order in which they come; fewer if no more come in time."""
    found, end = list[Answer](), time.monotonic() + seconds
    while len(found) < count and time.monotonic() < end:
        if answer := wire.answer(0.2):
            found.append(answer)
    return found


def test_who_is_there_is_known_by_name_and_by_another_number_after_it_was_away(rig: Rig) -> None:
    wire = rig.wire()
    assert wire.online() == {}
    for silo in SILOS[:2]:
        rig.join(silo, echo)
    before = wire.online()
    assert sorted(before) == sorted(SILOS[:2])
    rig.leave(SILOS[0])
    wait_for(lambda: list(wire.online()) == [SILOS[1]], "one is away")
    assert wire.online()[SILOS[1]] == before[SILOS[1]]


def test_each_silo_answers_with_the_bytes_it_made(rig: Rig) -> None:
    wire = rig.wire()
    for silo in SILOS:
        rig.join(silo, echo)
    frame = order(7, 3_000_000)
    asked(wire, *SILOS, number=7, frame=frame)
    found = answers(wire, 3)
    assert sorted(answer.silo for answer in found) == sorted(SILOS)
    for answer in found:
        assert (answer.round, answer.problem) == (7, "")
        assert answer.frame is not None
        assert answer.frame.parts == echo(frame).parts
        assert answer.frame.header == {"kind": "task", "round": 7}
        assert answer.frame.sha256 == echo(frame).sha256
        assert 0 < answer.seconds < 20
    assert wire.answer(0.3) is None


def test_any_kind_of_frame_crosses(rig: Rig) -> None:
    """What it is, and what its bytes mean, is a matter of those who ask and answer."""
    wire = rig.wire()
    said = Frame({"kind": "shares", "epoch": [1, {"a": None}], "grüße": True}, {"blob": bytes(range(256))})
    rig.join(SILOS[0], lambda frame: Frame({"kind": "masked", "got": frame.header["kind"]}, dict(frame.parts)))
    asked(wire, SILOS[0], frame=said)
    (answer,) = answers(wire, 1)
    assert answer.frame is not None
    assert (dict(answer.frame.header), answer.frame.parts) == ({"kind": "masked", "got": "shares"}, said.parts)


def test_a_slow_silo_holds_up_nobody_and_its_answer_comes_late(rig: Rig) -> None:
    wire, over = rig.wire(), threading.Event()

    def slow(frame: Frame) -> Frame:
        assert over.wait(20)
        return echo(frame)

    rig.join(SILOS[0], slow)
    rig.join(SILOS[1], echo)
    asked(wire, SILOS[0], number=1)
    asked(wire, SILOS[1], number=2)
    assert [answer.silo for answer in answers(wire, 1)] == [SILOS[1]]
    over.set()
    assert [(answer.silo, answer.round) for answer in answers(wire, 1)] == [(SILOS[0], 1)]


def test_after_its_patience_a_question_is_a_problem(rig: Rig) -> None:
    wire, over = rig.wire(), threading.Event()
    rig.join(SILOS[0], lambda frame: echo(frame) if over.wait(20) else frame)
    asked(wire, SILOS[0], patience=0.5)
    (answer,) = answers(wire, 1)
    assert (answer.frame, answer.problem) == (None, "no answer in 0.5 seconds")
    over.set()
    assert answers(wire, 1, 1.0) == []


def test_a_silo_whose_worker_fails_says_so_and_may_be_asked_again(rig: Rig) -> None:
    wire, tries = rig.wire(), iter([True])

    def failing(frame: Frame) -> Frame:
        if next(tries, False):
            raise RuntimeError("no memory")
        return echo(frame)

    rig.join(SILOS[0], failing)
    asked(wire, SILOS[0])
    (first,) = answers(wire, 1)
    assert first.frame is None or first.frame.kind == "failed"
    asked(wire, SILOS[0])
    (second,) = answers(wire, 1)
    assert second.frame is not None
    assert second.frame.parts == echo(order()).parts


def test_a_question_put_twice_has_answers_that_are_one(rig: Rig) -> None:
    wire = rig.wire()
    rig.join(SILOS[0], echo)
    asked(wire, SILOS[0])
    asked(wire, SILOS[0])
    found = answers(wire, 2)
    assert len(found) == 2
    assert {answer.frame.sha256 for answer in found if answer.frame} == {echo(order()).sha256}


def test_what_was_withdrawn_is_answered_no_more(rig: Rig) -> None:
    wire, over = rig.wire(), threading.Event()
    rig.join(SILOS[0], lambda frame: echo(frame) if over.wait(20) else frame)
    asked(wire, SILOS[0], number=1)
    asked(wire, SILOS[0], number=2)
    wire.withdraw(SILOS[0], 1)
    over.set()
    assert [answer.round for answer in answers(wire, 2, 3.0)] == [2]


def test_an_answer_that_is_longer_than_allowed_is_a_problem(rig: Rig) -> None:
    wire = rig.wire()
    rig.join(SILOS[0], lambda frame: Frame({"kind": "update"}, {"x": bytes(2000)}))
    for limit, fits in ((2000, True), (1999, False)):
        frame = order(limit % 100)
        wire.ask([Question(SILOS[0], wire.online()[SILOS[0]], 1, frame, limit)], 20.0)
        (answer,) = answers(wire, 1)
        assert (answer.frame is not None and answer.frame.kind == "update") is fits
