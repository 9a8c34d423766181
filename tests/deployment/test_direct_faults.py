"""The direct wire while either side dies at any step, or connections are cut: nothing is lost or doubled."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.deployment.direct.attendant import Attendant
from fedloom.deployment.direct.hub_process import OpenHub
from fedloom.deployment.direct.letters import Letter
from fedloom.deployment.direct.mailbox import ANSWERED, DONE, OPEN, Mailbox
from fedloom.deployment.direct.parts import PartStore
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.wire import Question, Wire
from fedloom.errors import FedloomError, RunFolderError
from rigs import SILOS, ConnectProxy, DirectRig, Killed, standing_rig
from support import names_in, wait_for

SILO = SILOS[0]
BIG = 5 * 2**20 + 7


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DirectRig]:
    with standing_rig("direct", tmp_path) as found:
        assert isinstance(found, DirectRig)
        yield found


def order(seed: int = 1, size: int = BIG) -> Frame:
    return Frame({"kind": "task", "round": seed}, {"x": random.Random(seed).randbytes(size)})


class Worker:
    """Answers, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, frame: Frame) -> Frame:
        self.asked += 1
        return Frame({"kind": "update"}, {"y": frame.parts["x"][::-1]})


def ask(wire: Wire, frame: Frame, number: int = 1) -> None:
    wire.ask([Question(SILO, 0, number, frame)], 60.0)


def taken(wire: Wire) -> Frame:
    answer = wait_for(lambda: wire.answer(0.2), "an answer", 40)
    assert answer.frame is not None, answer.problem
    return answer.frame


def killed_once(attendant: Attendant, monkeypatch: pytest.MonkeyPatch, name: str, *, after: bool) -> None:
    """Let an attendant die when it does something for the first time, before or after."""
    own: Callable[..., Any] = getattr(attendant, name)

    def deadly(*arguments: Any) -> Any:
        if after:
            own(*arguments)
        raise Killed

    monkeypatch.setattr(attendant, name, deadly)


STEPS = [(name, after) for name in ("_fetch", "_made", "_deliver", "_offered", "_send") for after in (False, True)]


@pytest.mark.parametrize(("step", "after"), STEPS)
def test_a_silo_that_is_killed_at_any_step_answers_when_it_is_back(
    rig: DirectRig, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    wire, worker = rig.wire(), Worker()
    first = rig.attendant(SILO)
    killed_once(first, monkeypatch, step, after=after)
    rig.start(first, worker)
    ask(wire, order())
    thread = rig.attendants[SILO][1]
    thread.join(20)
    assert not thread.is_alive()
    rig.leave(SILO)
    again = worker.asked
    rig.join(SILO, worker)
    assert taken(wire).parts["y"] == order().parts["x"][::-1]
    assert wire.answer(0.5) is None
    made = step in ("_deliver", "_offered", "_send")  # then the answer is kept, and nobody works at it again
    assert worker.asked == (again if made else again + 1)


def test_a_silo_that_is_killed_while_bytes_come_goes_on_where_they_ended(
    rig: DirectRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, first = rig.wire(), rig.attendant(SILO)
    receive = first.parts.receive

    def one_chunk(digest: str, size: int, offset: int, chunks: Iterator[bytes], sender: str) -> int:
        receive(digest, size, offset, [next(iter(chunks))], sender)
        raise Killed

    monkeypatch.setattr(first.parts, "receive", one_chunk)
    rig.start(first, Worker())
    ask(wire, order())
    rig.attendants[SILO][1].join(20)
    rig.leave(SILO)
    (begun,) = (rig.homes[SILO].post / "parts").glob("*.server")
    assert 0 < begun.stat().st_size < BIG
    second, offsets = rig.attendant(SILO), list[int]()
    receive_whole = second.parts.receive

    def seen(digest: str, size: int, offset: int, chunks: Iterator[bytes], sender: str) -> int:
        offsets.append(offset)
        return receive_whole(digest, size, offset, chunks, sender)

    monkeypatch.setattr(second.parts, "receive", seen)
    rig.start(second, Worker())
    assert taken(wire).parts["y"] == order().parts["x"][::-1]
    assert offsets == [2**20]


@pytest.mark.parametrize("step", ["asked", "fetching", "at work", "sending", "answered", "taken"])
def test_a_server_that_is_started_again_at_any_step_has_its_answer(
    rig: DirectRig, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    wire, worker = rig.wire(), Worker()
    attendant = rig.attendant(SILO)
    hooks = {"fetching": "_fetch", "at work": "_made", "sending": "_send"}
    reached, restarted = threading.Event(), threading.Event()
    if step in hooks:
        own: Callable[..., Any] = getattr(attendant, hooks[step])

        def halting(*arguments: Any) -> Any:
            if not reached.is_set():
                reached.set()
                assert restarted.wait(20)
            return own(*arguments)

        monkeypatch.setattr(attendant, hooks[step], halting)
    if step == "asked":
        ask(wire, order())
        rig.restart_server()
    rig.start(attendant, worker)
    if step in hooks:
        ask(wire, order())
        assert reached.wait(20)
        rig.restart_server()
        restarted.set()
    if step in ("answered", "taken"):
        ask(wire, order())
        number = Letter.order(SILO, order(), 0).number
        state = rig.opened.hub._mailbox.state
        wait_for(lambda: (found := state(number)) and found[0] == ANSWERED, "the answer is at the server")
        if step == "taken":
            taken(wire)
            wire = rig.wire()  # a run that was killed then goes on as another
            ask(wire, order())
        rig.restart_server()
    assert taken(wire).parts["y"] == order().parts["x"][::-1]
    assert worker.asked == 1


def test_an_answer_that_the_server_has_lost_is_sent_again(rig: DirectRig) -> None:
    """Its disk was put back: the silo still has the answer, and its worker is not asked again."""
    wire, worker = rig.wire(), Worker()
    rig.join(SILO, worker)
    ask(wire, order())
    taken(wire)
    rig.stop_server()
    for path in rig.server.post.glob("mailbox.sqlite*"):
        path.unlink()
    rig.start_server()
    wire = rig.wire()
    ask(wire, order())
    assert taken(wire).parts["y"] == order().parts["x"][::-1]
    assert worker.asked == 1


def test_through_a_proxy_that_cuts_connections_everything_arrives(rig: DirectRig) -> None:
    proxy = ConnectProxy(cut_after=3 * 2**20, cuts=3)
    rig.proxy = proxy.address
    wire, worker = rig.wire(), Worker()
    rig.join(SILO, worker)
    ask(wire, order())
    assert taken(wire).parts["y"] == order().parts["x"][::-1]
    assert worker.asked == 1
    assert proxy.cuts < 3
    assert set(proxy.targets) == {rig.server.charter.address}
    proxy.close()


def test_what_a_silo_has_already_is_not_sent_again(rig: DirectRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the second order is new; of its answer, too. All silos share one copy at the server."""
    wire, attendant = rig.wire(), rig.attendant(SILO)
    fetched, sent = list[str](), list[str]()
    fetch, send = attendant._fetch, attendant._send
    monkeypatch.setattr(attendant, "_fetch", lambda *a: (fetched.append(a[1]), fetch(*a))[1])
    monkeypatch.setattr(attendant, "_send", lambda *a: (sent.append(a[0]), send(*a))[1])
    rig.start(attendant, lambda frame: Frame({"kind": "update"}, dict(frame.parts)))
    old, new = b"old" * 1000, b"new" * 1000
    frames = Frame({"n": 1}, {"a": old}), Frame({"n": 2}, {"a": old, "b": new})
    for number, frame in enumerate(frames, start=1):
        ask(wire, frame, number)
        assert taken(wire).parts == frame.parts
    assert fetched == [frames[0].digests["a"], frames[1].digests["b"]]
    assert sent == []  # what an order brought is there already


def test_earlier_rounds_leave_nothing_behind(rig: DirectRig) -> None:
    wire = rig.wire()
    rig.join(SILO, Worker())
    for number in range(1, 6):
        ask(wire, order(number, 1000), number)
        taken(wire)
    wait_for(lambda: len(names_in(rig.homes[SILO].post / "parts")) <= 4, "the silo has dropped what is done")
    rig.opened.hub.finished("run-1")
    store = rig.opened.hub._parts
    store.sweep(rig.opened.hub._mailbox.named, older=-1.0)
    assert names_in(rig.server.post / "parts") == []


def test_a_full_disk_at_the_silo_is_an_answer(rig: DirectRig, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, attendant = rig.wire(), rig.attendant(SILO)

    def full(*_: Any) -> int:
        raise RunFolderError("cannot write x: no space is left on the disk")

    monkeypatch.setattr(attendant.parts, "receive", full)
    rig.start(attendant, Worker())
    ask(wire, order())
    failed = taken(wire)
    assert (failed.kind, failed.header["reason"]) == ("failed", "cannot write x: no space is left on the disk")


def test_two_servers_of_one_folder_are_one_too_many(rig: DirectRig) -> None:
    second = OpenHub(rig.server, rig.socket.with_name("second"), rig.server.listening)
    with pytest.raises(FedloomError, match="has a hub already"), second:
        pytest.fail("there were two")


def test_a_silo_attends_once(rig: DirectRig) -> None:
    worker = Worker()
    rig.join(SILO, worker)
    before = rig.opened.hub.present()[SILO].number
    second = rig.attendant(SILO)
    rig.attendants["twin"] = second, threading.Thread(target=second._listen, daemon=True)
    rig.attendants["twin"][1].start()
    wait_for(lambda: any("has joined already, by another process" in line for line in rig.said), "it is refused")
    assert rig.opened.hub.present()[SILO].number == before


def test_a_mailbox_keeps_one_answer_for_each_attempt(tmp_path: Path) -> None:
    box = Mailbox(tmp_path / "box")
    first = Letter.order(SILO, order(1, 10), 100)
    assert box.put(SILO, "run", 1, first) == first == box.put(SILO, "run", 1, first)
    failed, good = first.answer(Frame({"kind": "failed"})), first.answer(Frame({"kind": "update"}, {"y": b"1"}))
    assert box.answer(failed)
    assert not box.answer(good), "it has been answered"
    again = box.put(SILO, "run", 1, first)
    assert (again.attempt, box.open(SILO)) == (2, [again])
    assert not box.answer(good), "that attempt is over"
    assert box.answer(again.answer(Frame({"kind": "update"}, {"y": b"2"})))
    assert box.put(SILO, "run", 1, first) == again
    box.done(first.number)
    state = box.state(first.number)
    assert state is not None
    assert state[0] == DONE != OPEN
    box.forget_done(SILO, "run", 1)
    assert box.state(first.number) is not None
    box.forget_done(SILO, "run", 2)
    assert box.state(first.number) is None
    assert box.named == set()
    box.close()
    with sqlite3.connect(tmp_path / "box") as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_part_that_is_not_what_it_says_is_dropped(tmp_path: Path) -> None:
    store, data = PartStore(tmp_path), b"0123456789"
    digest = Frame({}, {"x": data}).digests["x"]
    assert store.receive(digest, 10, 0, [b"0123"], "a") == 4
    with pytest.raises(FedloomError, match="a part goes on at 4, not at 0"):
        store.receive(digest, 10, 0, [b"0"], "a")
    with pytest.raises(FedloomError, match="is not what its digest says"):
        store.receive(digest, 10, 4, [b"456788"], "a")
    assert store.had(digest, "a") == 0
    with pytest.raises(FedloomError, match="longer than it was said to be"):
        store.receive(digest, 10, 0, [data, b"x"], "b")
    assert not store.has(digest, 10)
    assert store.receive(digest, 10, store.had(digest, "b"), [], "b") == 10
    assert store.read([digest]) == {digest: data}
