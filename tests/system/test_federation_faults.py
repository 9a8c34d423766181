"""Whatever breaks in a federation of separate processes: it is said by name, nothing is lost, nothing is paid twice."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sqlite3
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.deployment.joining import Joining
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.round_store import RoundStore
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.files import read_lines
from local_grid import Deployment
from places import METHODS, RULES, Place, asked_now, config_of, halted, pid, private
from support import equal_bits

pytestmark = pytest.mark.system
FISSION = METHODS["fissionvae-d"]
ENDED = "the silo's worker ended before it had answered"


def test_a_worker_that_is_killed_in_mid_round_is_started_again(place: Place) -> None:
    name, silo = "worker-killed", place.joined[0]
    os.kill(pid(silo.worker), signal.SIGSTOP)  # so that it cannot answer before it is killed
    kill = place.when(lambda: asked_now(silo), lambda: os.kill(pid(silo.worker), signal.SIGKILL))
    place.run(name, *FISSION)
    kill.join()
    assert (1, silo.home.name) in place.events(name, "failed")
    assert any(ENDED in reason for reason in place.reasons(name, "failed"))
    assert place.same(name)


def test_a_full_disk_at_a_silo_is_said_and_the_run_goes_on(place: Place) -> None:
    name, silo = "disk-full", place.joined[1]
    resource.prlimit(pid(silo.worker), resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        place.run(name, *FISSION)
    finally:
        resource.prlimit(pid(silo.worker), resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert place.participants(name) == [[0, 2], [0, 2]]
    # Neither the round nor the line about it can be kept; nothing of what the silo made has left it.
    assert set(place.reasons(name, "failed")) == {"the silo cannot keep its audit log; its own log says why"}
    kept = silo.home.path / "rounds" / place.own_name(name)
    assert not kept.is_dir() or RoundStore(kept).rounds() == []  # as long as its log was short there is the folder


def test_a_slow_silo_is_not_waited_for_beyond_the_deadline(place: Place) -> None:
    name, silo = "slow", place.joined[2]
    os.kill(pid(silo.worker), signal.SIGSTOP)
    wake = place.when(
        lambda: (1, silo.home.name) in place.events(name, "missing"),
        lambda: os.kill(pid(silo.worker), signal.SIGCONT),
    )
    with place.ruled(replace(RULES, deadline=40.0, minimum=2, extensions=5)):  # the others have all the time they need
        place.run(name, *FISSION)
    wake.join()
    assert place.events(name, "missing") == [(1, silo.home.name)]
    assert place.events(name, "late") == [(1, silo.home.name)]
    assert place.participants(name) == [[0, 1], [0, 1, 2]]


KILLED = {
    "hub": lambda place: pid(place.serving.hub),
    "executor": lambda place: pid(place.serving.executor),
    "run": lambda place: children_of(pid(place.serving.executor))[0],
    "worker": lambda place: pid(place.joined[0].worker),
}


@pytest.mark.parametrize("who", KILLED)
def test_whatever_is_killed_the_run_is_over_soon(place: Place, who: str) -> None:
    """In its second round, which cannot be over before: one silo halts with its answer in hand."""
    name, silo = f"{who}-soon", place.joined[0]
    moments = list[float]()

    def kill() -> None:
        os.kill(KILLED[who](place), signal.SIGKILL)
        moments.append(time.monotonic())
        with contextlib.suppress(ProcessLookupError):  # it may be the one that was killed
            os.kill(pid(silo.worker), signal.SIGCONT)

    with place.dishonest(silo, (2, "halted")):
        killed = place.when(lambda: halted(silo.worker), kill)
        place.run(name, *FISSION)
        moments.append(time.monotonic())
        killed.join()
    seconds = moments[1] - moments[0]
    assert seconds < 10, f"{seconds:.1f} s at a load of {os.getloadavg()[0]:.0f}"  # with rest of round and statements
    assert place.same(name)
    assert place.participants(name) == [[0, 1, 2], [0, 1, 2]]
    place.wait_until_all_are_there()


def children_of(number: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_node_that_is_killed_comes_back(place: Place, moment: str) -> None:
    """With time enough for it nothing is missing in the end: the result is that of an undisturbed run."""
    name, silo = f"node-killed-{moment}", place.joined[1]

    def kill() -> None:
        silo.node.signal(signal.SIGKILL)

    kind = {"during": "asked", "after": "answered"}.get(moment)
    killed = place.when(lambda: kind is None or (1, silo.home.name) in place.events(name, kind), kill)
    if moment == "before":
        killed.join()
    place.run(name, *FISSION)
    killed.join()  # not in the next test
    assert place.same(name)


DAMAGES = {
    "nan": "silo 'mnist-1' sent values that are not finite in '.*' in round 1",
    "shapes": "silo 'mnist-1' tried to send tensor '.*' of shape .* in block '.*', which its sharing plan",
    "norms": "silo 'mnist-1' sent an update of '.*@.*' with norm .*, more than 5 times the",
    "undeclared": "silo 'mnist-1' tried to send block 'records@all', which its sharing plan does not send up",
}


def test_a_silo_that_lies_is_rejected_by_name_until_it_is_honest(place: Place) -> None:
    """One lie a round, and the result is that of a run from which the silo was absent as long."""
    name, silo, overrides = "dishonest", place.joined[1], (*FISSION, f"rounds={len(DAMAGES) + 1}")
    with place.dishonest(silo, *enumerate(DAMAGES, start=1)):
        place.run_alone(name, *overrides)
    assert place.events(name, "rejected") == [(number, "mnist-1") for number in range(1, len(DAMAGES) + 1)]
    for reason, expected in zip(place.reasons(name, "rejected"), DAMAGES.values(), strict=True):
        assert re.match(expected, reason)
    assert place.participants(name) == [[0, 2]] * len(DAMAGES) + [[0, 1, 2]]

    honest = Deployment(place.folder / f"{name}-absent", config_of(*overrides), place.federation)
    handler = honest.grid.handlers["mnist-1"]
    absent = Frame({"kind": "refused"})
    honest.grid.handlers["mnist-1"] = lambda task: absent if task.header["round"] <= len(DAMAGES) else handler(task)
    theirs = load_checkpoint(honest.run().folder.path)
    assert equal_bits(load_checkpoint(place.folder / name).server, theirs.server)


def test_a_worker_that_answers_nonsense_is_asked_again(place: Place) -> None:
    name, silo = "app-raises", place.joined[1]
    with place.dishonest(silo, (1, "nonsense")):
        place.run(name, *FISSION)
    assert place.events(name, "failed") == [(1, silo.home.name)]
    assert "this is no whole frame" in place.reasons(name, "failed")[0]
    assert place.same(name)


@pytest.mark.parametrize(
    ("noise", "damage", "paid"), [("test", "unfinished", 1), ("secure", "unfinished", 2), ("secure", "killed", 1)]
)
def test_a_worker_that_is_killed_in_a_private_round_pays_for_what_it_made(
    place: Place, noise: str, damage: str, paid: int
) -> None:
    """What was finished is sent again, free. What was not is made again: noise that cannot be repeated costs again."""
    name, silo = f"private-{noise}-{damage}", place.joined[1]
    with place.agreeing(private(50.0, noise)), place.dishonest(silo, (1, damage)):
        place.run(name, *METHODS["dp-sgd"])
        assert [charges(place, name, each) for each in place.joined] == [{1: 1, 2: 1}, {1: paid, 2: 1}, {1: 1, 2: 1}]
    assert place.events(name, "failed") == [(1, silo.home.name)]
    assert ENDED in place.reasons(name, "failed")[0]
    assert place.same(name) == (noise == "test")
    assert_all_that_left_is_logged(place, name)


def test_a_node_that_is_killed_in_a_private_round_costs_nothing_more(place: Place) -> None:
    """The update is made and kept when the node dies; the same bytes are sent when it is back."""
    name, silo = "private-node-killed", place.joined[1]

    def kill() -> None:
        silo.node.signal(signal.SIGKILL)
        os.kill(pid(silo.worker), signal.SIGCONT)

    with place.agreeing(private(50.0, "secure")), place.dishonest(silo, (1, "halted")):
        killed = place.when(lambda: halted(silo.worker), kill)
        place.run_alone(name, *METHODS["dp-sgd"])
        killed.join()
        assert [charges(place, name, each) for each in place.joined] == [{1: 1, 2: 1}] * 3
    assert Counter(place.events(name, "asked"))[(1, silo.home.name)] == 2
    assert_all_that_left_is_logged(place, name)


def charges(place: Place, name: str, silo: Joining) -> dict[int, int]:
    """How often a silo paid in each round of a run."""
    query = "SELECT round, count(*) FROM charges WHERE run = ? GROUP BY round"
    with sqlite3.connect(silo.home.path / "ledger.sqlite") as ledger:
        return dict(ledger.execute(query, (place.own_name(name),)).fetchall())


def assert_all_that_left_is_logged(place: Place, name: str) -> None:
    """Every silo took part in every round, and what came from it is what its own log says has left."""
    assert place.participants(name) == [[0, 1, 2], [0, 1, 2]]
    came = {(row["silo"], row["round"]): row["sha256"] for row in read_lines(place.folder / name / "egress.jsonl")}
    for silo in place.joined:
        own = silo.home.path / "runs" / place.own_name(name) / "egress.jsonl"
        assert {(row["silo"], row["round"]): row["sha256"] for row in read_lines(own)}.items() <= came.items()
        assert len(read_lines(own)) == 2
