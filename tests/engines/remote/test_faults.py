"""Whatever goes wrong at one silo: it is said by name, and the run goes on with the others."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor

import fedloom.engines.remote.round_store
from fedloom.config import Config
from fedloom.deployment.flower import grid_wire
from fedloom.engines.base import FederationState, Result, RoundReport, conclude, participants_of
from fedloom.engines.remote import rounds
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.round_store import RoundStore
from fedloom.engines.remote.rounds import ShortRoundError
from fedloom.engines.remote.silo import Agreement, Grant
from fedloom.engines.remote.work import Order, RefusedError, refusal, update_frame, update_in
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, FedloomError, RunFolderError
from fedloom.experiment import Experiment, Observer, train
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext, Site
from fedloom.privacy.accounting import Budget, NoGuarantee
from fedloom.privacy.ledger import BudgetSpentError, Ledger, read_accounts
from fedloom.privacy.noise import SecureNoise
from fedloom.privacy.silo_privacy import REPEATABLE
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.files import read_lines
from fedloom.sharing.codec import packed, unpacked
from fedloom.sharing.plan import BlockKey
from fedloom.sharing.update import Update
from fedloom.streams import Streams
from local_grid import PROMPT, Deployment, Handler, LocalGrid, agree
from support import equal_bits, tiny_config, wait_for

BAD = "mnist-1"
NAMES = ("mnist-0", BAD, "fashion-mnist-0", "fashion-mnist-1")
DP = ("privacy.mechanism=dp-sgd", "privacy.epsilon=8.0", "local.batch_size=8", "privacy.accountant=filter")


def federation_for(config: Config) -> Federation:
    return build_federation(config.data, Streams(config.seed))


def deployed(path: Path, *overrides: str, **rules: Any) -> Deployment:
    """Two silos of each of two groups; the second of the first group is the one that gives trouble."""
    config = tiny_config("method.name=fedvae", "engine.name=reference", *overrides)
    return Deployment(path, config, federation_for(config), replace(PROMPT, **rules))


def server_of(path: Path) -> dict[str, Tensor]:
    return load_checkpoint(path).server


def without(deployment: Deployment, path: Path, rounds_missed: tuple[int, ...]) -> dict[str, Tensor]:
    """What the server knows after a run in which the troublesome silo was never there in some rounds."""
    sound = deployed(path, f"rounds={deployment.config.rounds}")
    silo = sound.grid.handlers[BAD]

    def missing(frame: Frame) -> Frame:
        return Frame({"kind": "refused"}) if frame.header["round"] in rounds_missed else silo(frame)

    sound.grid.handlers[BAD] = missing
    return server_of(sound.run().folder.path)


def failing(times: int, silo: Handler, error: Exception) -> Handler:
    """Fails so many times, then does as it should."""
    left = iter(range(times))

    def handler(frame: Frame) -> Frame:
        for _ in left:
            raise error
        return silo(frame)

    return handler


def test_a_silo_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    deployment = deployed(tmp_path)
    deployment.grid.handlers[BAD] = failing(1, deployment.grid.handlers[BAD], RuntimeError("worker died"))
    deployment.run()
    train(deployment.config, tmp_path / "reference", deployment.federation)
    assert deployment.told("failed") == [(1, BAD)]
    assert deployment.reasons("failed") == ["RuntimeError: worker died (Flower's error 2)"]
    assert equal_bits(server_of(tmp_path / "server"), server_of(tmp_path / "reference"))


def test_a_silo_that_keeps_failing_is_done_without(tmp_path: Path) -> None:
    deployment = deployed(tmp_path / "failing")
    deployment.grid.handlers[BAD] = failing(9, deployment.grid.handlers[BAD], RuntimeError("broken"))
    run = deployment.run()
    assert deployment.told("failed") == [(1, BAD), (1, BAD), (2, BAD), (2, BAD)]  # attempts = 2
    assert [row["participants"] for row in run.metrics()] == [[0, 2, 3]] * 2
    assert equal_bits(server_of(run.folder.path), without(deployment, tmp_path / "without", (1, 2)))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), "the round went on without it"),
        (
            ("method.name=align_fl", "server.samples=32", "server.epochs=1", "server.latents=histogram"),
            "the round went on without it, and without 'latents', which was due from it",
        ),
    ],
)
def test_a_silo_that_is_not_there_is_waited_for_only_a_while(
    tmp_path: Path, overrides: tuple[str, ...], reason: str
) -> None:
    deployment = deployed(tmp_path, *overrides)
    deployment.grid.offline.add(BAD)
    run = deployment.run()
    assert deployment.told("missing") == [(1, BAD), (2, BAD)]
    assert deployment.reasons("missing") == [reason] * 2
    assert [row["participants"] for row in run.metrics()] == [[0, 2, 3]] * 2
    assert all(PROMPT.grace < row["seconds"] < PROMPT.deadline for row in run.metrics())


def test_a_silo_that_comes_back_takes_part_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = deployed(tmp_path, grace=100.0)
    deployment.grid.offline.add(BAD)
    looks, get_nodes = itertools.count(1), deployment.grid.get_nodes

    def look() -> list[Any]:
        if next(looks) == 3:
            deployment.grid.offline.clear()
        return get_nodes()

    monkeypatch.setattr(deployment.grid, "get_nodes", look)
    run = deployment.run()
    assert [row["participants"] for row in run.metrics()] == [[0, 1, 2, 3]] * 2
    assert deployment.told("missing") == []


@pytest.mark.parametrize("trouble", ["it raises", "it hangs"])
def test_who_is_there_is_known_from_before_while_flower_cannot_say(
    monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    grid, over = LocalGrid({BAD: refusal_of}), threading.Event()
    asking = grid_wire.FlowerWire(grid)
    before = asking.online()
    assert list(before) == [BAD]
    monkeypatch.setattr(grid_wire, "LOOK", 0.5)

    def get_nodes() -> list[Any]:
        if trouble == "it raises":
            raise ConnectionError("no SuperLink")
        over.wait(100)
        return []

    monkeypatch.setattr(grid, "get_nodes", get_nodes)
    assert asking.online() == before
    assert asking.online() == before
    over.set()


def refusal_of(_: Frame) -> Frame:
    return refusal("not today")


@pytest.mark.parametrize("drawn_again", [True, False])
@pytest.mark.parametrize("stragglers", ["drop", "use"])
def test_a_slow_silo(tmp_path: Path, stragglers: str, drawn_again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 1 has no more time when the others have answered; the answer comes while round 2 is under way."""
    everybody, but_for_it = [0, 1, 2, 3], [0, 2, 3]
    deployment = deployed(tmp_path, f"participation.rate={1.0 if drawn_again else 0.5}", stragglers=stragglers)
    drawn = [list(participants_of(deployment.config, deployment.federation, number)) for number in (1, 2)]
    assert drawn == [everybody, everybody if drawn_again else but_for_it]
    monkeypatch.setattr(rounds, "clock", lambda: 0.0 if len(deployment.told("answered")) < 3 else 1e6)
    silo, first_round_over = deployment.grid.handlers[BAD], threading.Event()

    def slow(frame: Frame) -> Frame:
        answer = silo(frame)
        if frame.header["round"] == 1:
            assert first_round_over.wait(100)
        return answer

    deployment.grid.handlers[BAD] = slow
    other = deployment.grid.handlers["mnist-0"]

    def prompt(frame: Frame) -> Frame:
        if frame.header["round"] == 2:
            first_round_over.set()
            wait_for(lambda: (1, BAD) in (*deployment.told("late"), *deployment.told("answered")), seconds=100)
        return other(frame)

    deployment.grid.handlers["mnist-0"] = prompt
    run = deployment.run()
    assert deployment.told("missing") == [(1, BAD)]
    used = stragglers == "use"
    present = everybody if used or drawn_again else but_for_it
    assert [row["participants"] for row in run.metrics()] == [but_for_it, present]
    assert deployment.told("late") == ([] if used else [(1, BAD)])
    answered = [event for event in deployment.told("answered") if event[1] == BAD]
    assert answered == ([(1, BAD)] if used else [(2, BAD)] if drawn_again else [])
    assert [(row["round"], row["silo"]) for row in run.folder.egress()].count((1, BAD)) == used


Damage = Callable[[Frame], Frame]


def changed(change: Callable[[str, Tensor], Tensor]) -> Damage:
    """An update in which the encoder's tensors are changed."""

    def damage(frame: Frame) -> Frame:
        update = update_in(frame, BAD)
        key = BlockKey("encoder", "all")
        update.blocks[key].update({n: change(n, t) for n, t in update.blocks[key].items()})  # type: ignore[index]
        return update_frame(update)

    return damage


def with_another_block(frame: Frame) -> Frame:
    update = update_in(frame, BAD)
    extra = {BlockKey("records", "silo=mnist-1"): {"x": torch.zeros(4)}}
    return update_frame(replace(update, blocks={**update.blocks, **extra}))


def with_another_payload(frame: Frame) -> Frame:
    return update_frame(replace(update_in(frame, BAD), payloads={"losses": {"mean": torch.zeros(1)}}))


def with_the_wrong_round(frame: Frame) -> Frame:
    return replace(frame, header={**frame.header, "round": 7})


def cut_short(frame: Frame) -> Frame:
    return replace(frame, parts={name: part[:-3] for name, part in frame.parts.items()})


def with_part_missing(frame: Frame) -> Frame:
    return replace(frame, parts={name: part for name, part in frame.parts.items() if "decoder" not in name})


def saying(counts: dict[str, Any]) -> Damage:
    """An update that gives other numbers of records."""
    return lambda frame: replace(frame, header={**frame.header, "counts": counts})


def holding(count: Any) -> Damage:
    return saying({"all": count, "group=mnist": count})


def with_a_round_beyond_numbers(frame: Frame) -> Frame:
    return replace(frame, header={**frame.header, "round": math.inf})


DAMAGES: dict[str, tuple[Damage, str]] = {
    "nan": (changed(lambda _, t: t * torch.nan), "silo 'mnist-1' sent values that are not finite in 'encoder@all/"),
    "shapes": (changed(lambda _, t: t.repeat(2, *[1] * (t.ndim - 1))), "silo 'mnist-1' tried to send tensor"),
    "dtype": (changed(lambda _, t: t.double()), r"as torch\.float64, not as torch\.float32"),
    "norms": (changed(lambda _, t: 10 * t), r"silo 'mnist-1' sent an update of 'encoder@all' with norm .* 5 times"),
    "undeclared block": (with_another_block, "silo 'mnist-1' tried to send block 'records@silo=mnist-1'"),
    "undeclared payload": (with_another_payload, "silo 'mnist-1' tried to send payload 'losses'"),
    "wrong round": (with_the_wrong_round, "silo 'mnist-1' sent round 7 when it was asked for 1"),
    "cut short": (cut_short, "is not a table of tensors"),
    "part missing": (with_part_missing, "silo 'mnist-1' sent no tensor .* of block 'decoder@all'"),
    "no records": (holding(-5.0), r"silo 'mnist-1' says that it holds \{'all': -5.0, .*\} records"),
    "no group": (saying({"all": 40.0}), r"says that it holds \{'all': 40.0\} records"),
    "counts that differ": (saying({"all": 40.0, "group=mnist": 39.0}), "says that it holds .* their sum"),
    "infinite records": (holding(math.inf), "says that it holds .*inf"),
    "half a record": (holding(39.5), "says that it holds .*39.5"),
    "too many records": (holding(9_999_999.0), r"says that it holds .* up to 40 \(as the charter declares\)"),
    "a number beyond numbers": (holding(10**400), "silo 'mnist-1' sent an update that cannot be read"),
    "a round beyond numbers": (with_a_round_beyond_numbers, "silo 'mnist-1' sent an update that cannot be read"),
    "counts that are a list": (saying([1]), "silo 'mnist-1' sent an update that cannot be read"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_bad_update_is_rejected_by_name(tmp_path: Path, damage: Damage, reason: str) -> None:
    deployment = deployed(tmp_path / "bad", "rounds=1")
    silo = deployment.grid.handlers[BAD]
    deployment.grid.handlers[BAD] = lambda frame: damage(silo(frame))
    run = deployment.run()
    assert deployment.told("rejected") == [(1, BAD)]
    (told,) = deployment.reasons("rejected")
    assert re.search(reason, told), told
    assert run.folder.status["state"] == "finished"
    assert equal_bits(server_of(run.folder.path), without(deployment, tmp_path / "without", (1,)))


def constant(value: float, count: float, own: Handler, name: str) -> Handler:
    """A silo all of whose tensors hold one value, and that claims so many records."""

    def handler(frame: Frame) -> Frame:
        update = update_in(own(frame), name)
        blocks = {key: {n: torch.full_like(t, value) for n, t in part.items()} for key, part in update.blocks.items()}
        return update_frame(replace(update, blocks=blocks, counts=dict.fromkeys(update.counts, count)))

    return handler


@pytest.mark.parametrize(
    ("declared", "claim", "weights", "mean", "group_mean"),
    [
        (True, 9_999_999.0, "size", 3.5, 1.0),  # rejected
        (True, 20.0, "size", 3.2, 4 / 3),  # less than declared weighs as it is claimed
        (False, 9_999_999.0, "size", 3.0, 1.5),
        (False, 20.0, "size", 3.0, 1.5),
        (False, 9_999_999.0, "equal-groups", 3.75, 1.5),
    ],
)
def test_a_claim_weighs_no_more_than_was_declared(
    tmp_path: Path, declared: bool, claim: float, weights: str, mean: float, group_mean: float
) -> None:
    """Silos of 40 records send 1, 2 and 6, the first two of one group. Taken at its word, 9,999,999 would give 2.00."""
    deployment = deployed(tmp_path, "method.name=fissionvae", "rounds=1", f"sharing.weights={weights}", norm_factor=0.0)
    deployment.declared = declared
    for name, value, count in ((NAMES[0], 1.0, 40.0), (BAD, 2.0, claim), (NAMES[2], 6.0, 40.0)):
        deployment.grid.handlers[name] = constant(value, count, deployment.grid.handlers[name], name)
    deployment.grid.offline.add(NAMES[3])
    server = server_of(deployment.run().folder.path)
    rejected = declared and claim > 40
    assert deployment.told("rejected") == ([(1, BAD)] if rejected else [])
    for place, expected in (("encoder@all", mean), ("decoder@group=mnist", group_mean), ("decoder@group=fashion", 6.0)):
        tensors = [tensor for name, tensor in server.items() if place in name]
        assert tensors
        assert all(torch.equal(tensor, torch.full_like(tensor, expected)) for tensor in tensors)


class LosingGrid(LocalGrid):
    """The first answer of the troublesome silo never arrives, and ``then`` something happens to the silo."""

    then: Callable[[LosingGrid], None]
    first = ""

    def push_messages(self, messages: list[Message]) -> list[str]:
        numbers = super().push_messages(messages)
        asked = zip(numbers, messages, strict=True)
        own = [number for number, message in asked if self._nodes[message.metadata.dst_node_id] == BAD]
        self.first = self.first or next(iter(own), "")
        return numbers

    def pull_messages(self, numbers: list[str]) -> list[Message]:
        replies = super().pull_messages(numbers)
        if not replies or numbers != [self.first]:
            return replies
        self.then(self)
        return []

    def get_nodes(self) -> list[Any]:
        """Who is gone is back at the next look."""
        gone = set(self.offline)
        seen = super().get_nodes()
        self.offline -= gone
        return seen

    def leave(self) -> None:
        self.offline.add(BAD)

    def move(self) -> None:
        self._nodes = {number + 1000 * (name == BAD): name for number, name in self._nodes.items()}

    def stay(self) -> None:
        pass


def later(deployment: Deployment, seconds: float) -> Callable[[], float]:
    """A clock that goes forward when the three other silos have answered."""
    return lambda: time.monotonic() + (seconds if len(deployment.told("answered")) >= 3 else 0.0)


@pytest.mark.parametrize(
    ("then", "resend"), [(LosingGrid.stay, 100.0), (LosingGrid.leave, 1e6), (LosingGrid.move, 1e6)]
)
def test_an_answer_that_never_arrives_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: Callable[[LosingGrid], None], resend: float
) -> None:
    """Because the silo is silent for long, or was gone, or is another node: it sends the same bytes."""
    deployment = deployed(tmp_path, deadline=240.0, resend=resend)
    deployment.grid = grid = LosingGrid(deployment.grid.handlers)
    grid.then = then
    monkeypatch.setattr(rounds, "clock", later(deployment, 200.0))
    deployment.run()
    everybody = [(number, name) for number in (1, 2) for name in NAMES]
    assert sorted(deployment.told("asked")) == sorted([*everybody, (1, BAD)])
    assert sorted(deployment.told("answered")) == sorted(everybody)
    assert {event.event for event in deployment.events} == {"asked", "answered"}
    train(deployment.config, tmp_path / "reference", deployment.federation)
    assert equal_bits(server_of(tmp_path / "server"), server_of(tmp_path / "reference"))


def test_a_silent_silo_is_asked_no_more_often_than_is_ruled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, ticks, over = deployed(tmp_path, "rounds=1", resend=10.0), itertools.count(), threading.Event()
    monkeypatch.setattr(rounds, "clock", lambda: float(next(ticks)) if len(deployment.told("answered")) == 3 else 0.0)
    monkeypatch.setattr(rounds, "TICK", 0.01)
    deployment.grid.handlers[BAD] = lambda _: refusal(str(over.wait(100)))
    deployment.run()
    over.set()
    assert deployment.told("asked").count((1, BAD)) == PROMPT.attempts
    assert deployment.told("missing") == [(1, BAD)]  # and the round has waited for it until its deadline
    assert next(ticks) > PROMPT.deadline


@pytest.mark.parametrize("arrival", [1, 2])
def test_a_second_answer_to_the_same_question_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrival: int
) -> None:
    """The silo seemed to be gone while it was at work. Its second answer comes in the same round, or in the next."""
    deployment = deployed(tmp_path, stragglers="use")
    deployment.grid = grid = LosingGrid(deployment.grid.handlers)
    monkeypatch.setattr(grid, "pull_messages", partial(LocalGrid.pull_messages, grid))  # nothing is lost
    silo, other = grid.handlers[BAD], grid.handlers["mnist-0"]
    calls, round_began, taken = itertools.count(1), threading.Event(), []
    take = rounds.RemoteEngine._take

    def taking(self: rounds.RemoteEngine, answer: Any, progress: Any) -> None:
        take(self, answer, progress)
        taken.append((answer.round, answer.silo))

    def twice(frame: Frame) -> Frame:
        match next(calls):
            case 1:
                grid.leave()
                wait_for(lambda: deployment.told("asked").count((1, BAD)) == 2, seconds=100)
            case 2:
                assert round_began.wait(100)
        return silo(frame)

    def waiting(frame: Frame) -> Frame:
        if frame.header["round"] == arrival:
            round_began.set()
            wait_for(lambda: taken.count((1, BAD)) == 2, seconds=100)
        return other(frame)

    monkeypatch.setattr(rounds.RemoteEngine, "_take", taking)
    grid.handlers.update({BAD: twice, "mnist-0": waiting})
    deployment.run()
    assert deployment.told("asked").count((1, BAD)) == 2
    assert sorted(deployment.told("answered")) == sorted((number, name) for number in (1, 2) for name in NAMES)
    assert {event.event for event in deployment.events} == {"asked", "answered"}
    train(deployment.config, tmp_path / "reference", deployment.federation)
    assert equal_bits(server_of(tmp_path / "server"), server_of(tmp_path / "reference"))


def test_a_silo_that_answers_twice_counts_once(tmp_path: Path) -> None:
    """It was only slow, and was asked again: its second answer is used in no later round, and noted nowhere."""
    deployment, whole = deployed(tmp_path / "twice", resend=0.3, stragglers="use"), deployed(tmp_path / "whole")
    own, slow = deployment.grid.handlers[BAD], [3.0, 0.0]

    def answer(frame: Frame) -> Frame:
        time.sleep(slow.pop(0) if slow else 0.0)
        return own(frame)

    deployment.grid.handlers[BAD] = answer
    assert equal_bits(server_of(deployment.run().folder.path), server_of(whole.run().folder.path))
    assert deployment.told("asked").count((1, BAD)) == 2
    assert deployment.told("answered").count((1, BAD)) == 1
    assert deployment.told("late") == []


def test_a_busy_silo_delays_one_later_round_by_its_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is at work for round 1 until round 4. Time passes by a second a look, once the three others have answered."""
    deployment = deployed(tmp_path, "rounds=4", deadline=30.0, grace=10.0)
    silo, other, at_last = deployment.grid.handlers[BAD], deployment.grid.handlers["mnist-0"], threading.Event()
    began, now = {}, [0.0]

    def clock() -> float:
        others = [name for _, name in deployment.told("asked") if name != BAD]
        now[0] += len(others) == len([name for _, name in deployment.told("answered") if name != BAD])
        return now[0]

    def stuck(frame: Frame) -> Frame:
        assert at_last.wait(100)
        return silo(frame)

    def prompt(frame: Frame) -> Frame:
        began[frame.header["round"]] = now[0]
        if frame.header["round"] == 4:
            at_last.set()
            wait_for(lambda: (4, BAD) in deployment.told("answered"), seconds=100)
        return other(frame)

    monkeypatch.setattr(rounds, "clock", clock)
    monkeypatch.setattr(rounds, "TICK", 0.01)
    deployment.grid.handlers.update({BAD: stuck, "mnist-0": prompt})
    run = deployment.run()
    assert [row["participants"] for row in run.metrics()] == [[0, 2, 3]] * 3 + [[0, 1, 2, 3]]
    own = [(event.round, event.event) for event in deployment.events if event.silo == BAD]
    missed = [(number, "missing") for number in (1, 2, 3)]
    assert own == [(1, "asked"), *missed, (1, "late"), (4, "asked"), (4, "answered")]
    first, second, third = (began[number + 1] - began[number] for number in (1, 2, 3))
    assert 30 < first < 40
    assert 10 < second < 20
    assert third < 10


@pytest.mark.parametrize(
    ("merge", "expected"),
    [("mean", (9.0 + 2.0**20) / 4), ("median", 4.0), ("trimmed-mean", 4.0)],  # 1, 2, 6 and poison
)
def test_a_poisoned_silo_ruins_the_mean_alone(tmp_path: Path, merge: str, expected: float) -> None:
    """Nobody looks at norms here; what the silos trained is replaced by numbers that are easy to follow."""
    overrides = ("method.name=fedvae", "rounds=1", "sharing.weights=equal", f"server.merge.name={merge}")
    deployment = deployed(tmp_path, *overrides, norm_factor=0.0)
    for name, value in zip(NAMES, (1.0, 2.0, 6.0, 2.0**20), strict=True):
        deployment.grid.handlers[name] = constant(value, 40.0, deployment.grid.handlers[name], name)
    server = server_of(deployment.run().folder.path)
    assert server
    assert all(torch.equal(tensor, torch.full_like(tensor, expected)) for tensor in server.values())


def test_of_two_silos_one_that_moves_far_from_the_servers_copy_is_rejected(tmp_path: Path) -> None:
    deployment = deployed(tmp_path, "rounds=1")
    silo = deployment.grid.handlers[BAD]
    deployment.grid.handlers[BAD] = lambda frame: changed(lambda _, t: 10 * t)(silo(frame))
    deployment.grid.offline.update(NAMES[2:])
    (row,) = deployment.run().metrics()
    assert row["participants"] == [0]
    (told,) = deployment.reasons("rejected")
    assert re.match("silo 'mnist-1' sent an update of 'encoder@all' with norm .* 5 times the server's", told), told


def without_payloads(frame: Frame) -> Frame:
    return update_frame(replace(update_in(frame, BAD), payloads={}))


def with_double_payloads(frame: Frame) -> Frame:
    update = update_in(frame, BAD)
    doubled = {name: {n: t.double() for n, t in tensors.items()} for name, tensors in update.payloads.items()}
    return update_frame(replace(update, payloads=doubled))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without_payloads, r"silo 'mnist-1' sent the payloads \[\]; round 1 asks for \['.*'\]"),
        (with_double_payloads, "silo 'mnist-1' sent tensor .* of payload .* as torch.float64, not as float32"),
    ],
)
def test_payloads_that_lack_or_are_of_another_kind_are_rejected(tmp_path: Path, damage: Damage, reason: str) -> None:
    server = ("server.samples=32", "server.epochs=1", "server.latents=histogram", "server.components=3")
    deployment = deployed(tmp_path, "method.name=align_fl", *server, "rounds=1")
    silo = deployment.grid.handlers[BAD]
    deployment.grid.handlers[BAD] = lambda frame: damage(silo(frame))
    (row,) = deployment.run().metrics()
    assert row["participants"] == [0, 2, 3]
    (told,) = deployment.reasons("rejected")
    assert re.search(reason, told), told


def test_an_error_in_the_look_at_an_update_concerns_its_silo_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(frame: Frame, silo: str) -> Update:
        if silo == BAD:
            raise ArithmeticError("unforeseen")
        return update_in(frame, silo)

    monkeypatch.setattr(rounds, "update_in", broken)
    deployment = deployed(tmp_path, "rounds=1")
    assert deployment.run().folder.status["state"] == "finished"
    assert deployment.reasons("rejected") == ["silo 'mnist-1' sent what cannot be checked: ArithmeticError: unforeseen"]


def test_a_round_whose_result_is_not_finite_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overflowing(*arguments: Any, **named: Any) -> tuple[FederationState, RoundReport]:
        state, report = conclude(*arguments, **named)
        next(iter(state.server.blocks[BlockKey("encoder", "all")].values())).fill_(torch.inf)
        return state, report

    monkeypatch.setattr(rounds, "conclude", overflowing)
    with pytest.raises(FedloomError, match="round 1 would leave values that are not finite in 'encoder@all/"):
        deployed(tmp_path).run()


def test_a_round_without_its_minimum_can_be_resumed(tmp_path: Path) -> None:
    deployment = deployed(tmp_path, minimum=4)
    silo = deployment.grid.handlers[BAD]
    deployment.grid.handlers[BAD] = lambda _: refusal("not today")
    with pytest.raises(
        ShortRoundError, match=r"round 1 has 3 of the 4 updates that it needs .* silo 'mnist-1' refused: not today"
    ):
        deployment.run()
    deployment.grid.handlers[BAD] = silo
    assert deployment.run().folder.status["state"] == "finished"
    train(deployment.config, tmp_path / "reference", deployment.federation)
    assert equal_bits(server_of(tmp_path / "server"), server_of(tmp_path / "reference"))


def test_a_round_waits_for_its_minimum_as_long_as_is_ruled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = deployed(tmp_path, minimum=4, deadline=10.0, extensions=2)
    deployment.grid.offline.add(BAD)
    times = itertools.count()
    monkeypatch.setattr(rounds, "clock", lambda: float(next(times)) if len(deployment.told("answered")) == 3 else 0.0)
    monkeypatch.setattr(rounds, "TICK", 0.01)
    with pytest.raises(ShortRoundError, match="silo 'mnist-1' sent nothing in time"):
        deployment.run()
    assert 30 < next(times) < 40


class Killed(Observer):
    """A server that dies while a round's results come in."""

    def __init__(self, round: int) -> None:
        self._round = round

    def silo_done(self, context: RoundContext, result: Result) -> None:
        if context.round == self._round and result.silo == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("overrides", [(), ("sharing.scopes={encoder='silo'}", "local.keep_optimizer=true")])
def test_a_server_that_died_goes_on_and_silos_send_the_same_again(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    deployment = deployed(tmp_path, "rounds=3", *overrides)
    with pytest.raises(KeyboardInterrupt):
        deployment.run(observer=Killed(2))
    assert load_checkpoint(tmp_path / "server").round == 1
    shelves = [RoundStore(deployment.home(number) / "rounds" / "run-1") for number in range(4)]
    patience = time.monotonic() + 60
    while not all(
        2 in round_store.rounds() for round_store in shelves
    ):  # silos finish what they were asked for, in their own time
        assert time.monotonic() < patience
        time.sleep(0.05)
    deployment.run()
    train(deployment.config, tmp_path / "reference", deployment.federation)
    assert equal_bits(server_of(tmp_path / "server"), server_of(tmp_path / "reference"))
    for number in range(4):
        rows = read_lines(deployment.home(number) / "runs" / "run-1" / "metrics.jsonl")
        assert [row["round"] for row in rows] == [1, 2, 3]


def test_an_answer_that_was_lost_is_not_trained_for_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = deployed(tmp_path, *DP)
    silo, trained = deployment.grid.handlers[BAD], []
    lost = iter(("lost",))
    original = Trainer.train

    def counted(self: Trainer, task: Any) -> Result:
        trained.append((task.silo, task.context.round))
        return original(self, task)

    def losing(frame: Frame) -> Frame:
        answer = silo(frame)
        for _ in lost:
            raise ConnectionError("the answer was lost")
        return answer

    monkeypatch.setattr(Trainer, "train", counted)
    deployment.grid.handlers[BAD] = losing
    deployment.run()
    assert deployment.told("failed") == [(1, BAD)]
    assert sorted(trained) == [(silo, round) for silo in range(4) for round in (1, 2)]
    (account,) = read_accounts(deployment.home(1) / "ledger.sqlite")
    assert account.releases[0].charges == 2


def test_a_silo_whose_budget_is_spent_says_so_and_sits_out(tmp_path: Path) -> None:
    deployment = replace(deployed(tmp_path, *DP), agreement=lambda *_: Grant(8.0))
    deployment.run("first", "run-1")
    deployment.events.clear()
    with pytest.raises(
        ShortRoundError, match="refused: silo 'mnist-0' sits out: this would pass what may be spent on its data"
    ):
        deployment.run("second", "run-2")  # the budget belongs to the data, not to the run
    assert {event.event for event in deployment.events} == {"asked", "refused"}


def test_a_full_disk_costs_no_budget_and_is_told_in_the_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = deployed(tmp_path, *DP)
    monkeypatch.setattr(fedloom.engines.remote.round_store, "SPARE", 2**80)
    with pytest.raises(ShortRoundError):
        deployment.run()
    assert sorted(deployment.told("failed")) == sorted(2 * [(1, silo.name) for silo in deployment.federation.silos])
    assert set(deployment.reasons("failed")) == {f"silo '{name}' failed; its own log says why" for name in NAMES}
    assert caplog.text.count("no space is left on the disk") == 8  # 4 silos, 2 attempts
    assert not (deployment.home(1) / "ledger.sqlite").exists()


@pytest.mark.parametrize(("lacking", "kind"), [(0, "update"), (1, "failed")])
def test_a_round_needs_room_for_all_that_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: int, kind: str
) -> None:
    """Also where little comes down: the room is that of the model, its moments and the update."""
    deployment, task = first_task(tmp_path, agree)
    model = Experiment.of(deployment.config, deployment.federation).method.build(Site(BAD, (0,)))
    needed = 4 * sum(tensor.nbytes for tensor in model.state_dict().values()) + fedloom.engines.remote.round_store.SPARE
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - lacking))
    assert deployment.service(1).answer(task).kind == kind


SECURE = Grant(100.0)


def first_task(path: Path, agreement: Agreement) -> tuple[Deployment, Frame]:
    """A private experiment, and what the troublesome silo is asked in its first round."""
    deployment = deployed(path, *DP, "rounds=1")
    deployment.agreement = agreement
    taken: list[Frame] = []

    def taking(frame: Frame) -> Frame:
        taken.append(frame)
        return refusal("only looking")

    deployment.grid.handlers[BAD] = taking
    deployment.run()
    return deployment, taken[0]


def charges(deployment: Deployment) -> int:
    (account,) = read_accounts(deployment.home(1) / "ledger.sqlite")
    return account.releases[0].charges


def test_secure_noise_is_paid_for_once_and_the_same_bytes_are_sent_again(tmp_path: Path) -> None:
    deployment, task = first_task(tmp_path, lambda *_: SECURE)
    first, second = deployment.service(1).answer(task), deployment.service(1).answer(task)
    assert first.kind == "update"
    assert first == second
    assert charges(deployment) == 1
    shutil.rmtree(deployment.home(1) / "rounds")  # what was finished is lost: another attempt is another release
    third = deployment.service(1).answer(task)
    assert third.kind == "update"
    assert third.parts != first.parts
    assert charges(deployment) == 2


@pytest.mark.parametrize("asked", ["secure", "test"])
@pytest.mark.parametrize("grant", [Grant(0.0), SECURE, Grant(0.0, repeatable=True)])
def test_only_noise_that_is_granted_for_tests_comes_from_the_seed(grant: Grant, asked: str, tmp_path: Path) -> None:
    """Whatever the server asks for, and where nothing may be spent, which a silo starts with before it is asked."""
    deployment = deployed(tmp_path, *DP, f"privacy.noise={asked}")
    deployment.agreement = lambda *_: grant
    service = deployment.service(1)
    for _ in range(2):
        trainer = service.ready(deployment.config).trainer
        assert trainer.secret == (trainer.seeded if grant.repeatable else SecureNoise())


def test_what_is_only_counted_is_counted(tmp_path: Path) -> None:
    deployment, task = first_task(tmp_path, lambda *_: Grant(math.inf))
    assert deployment.service(1).answer(task).kind == "update"
    (account,) = read_accounts(deployment.home(1) / "ledger.sqlite")
    assert 1 < account.spent < 8  # planned for a filter of 8, counted by a sharper accountant


def test_noise_that_can_be_repeated_is_charged_as_no_guarantee(tmp_path: Path) -> None:
    deployment, task = first_task(tmp_path, agree)
    assert deployment.service(1).answer(task).kind == "update"
    ledger = Ledger(deployment.home(1) / "ledger.sqlite", read_only=True)
    assert ledger.events(BAD) == [NoGuarantee(REPEATABLE)]
    assert ledger.accounts()[0].spent == math.inf
    ledger.close()


def test_the_ledger_is_begun_by_the_grant(tmp_path: Path) -> None:
    deployment, task = first_task(tmp_path, lambda *_: Grant(99.0, 1e-6, "subject"))
    assert deployment.service(1).answer(task).kind == "update"
    (account,) = read_accounts(deployment.home(1) / "ledger.sqlite")
    assert account.budget == Budget(99.0, 1e-6, "filter", "subject")


def test_bytes_that_were_not_paid_for_are_not_sent(tmp_path: Path) -> None:
    deployment, task = first_task(tmp_path, lambda *_: SECURE)
    first = deployment.service(1).answer(task)
    (stored,) = (deployment.home(1) / "rounds").rglob("update.frame")
    stored.write_bytes(update_frame(replace(update_in(first, BAD), counts={"all": 7.0})).to_bytes())
    assert deployment.service(1).answer(task).parts != first.parts
    assert charges(deployment) == 2


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (RefusedError("not with me"), "refused", "not with me"),
        (ConfigError("/home/me/policy.toml is not valid TOML"), "refused", "cannot do this; its own log says why"),
        (BudgetSpentError("epsilon from 3.1 to 8.2"), "refused", "sits out: this would pass what may be spent on its"),
        (RunFolderError("/home/me/disk is full"), "failed", "failed; its own log says why"),
        (OSError("/home/me/disk is gone"), "failed", "failed; its own log says why"),
    ],
)
def test_only_what_was_written_for_others_is_told_to_the_server(
    tmp_path: Path, error: Exception, kind: str, reason: str
) -> None:
    deployment, task = first_task(tmp_path, agree)

    def raising(*_: Any) -> Grant:
        raise error

    deployment.agreement = raising
    answer = deployment.service(1).answer(task)
    assert answer.kind == kind
    assert reason in answer.header["reason"]
    assert str(error) not in answer.header["reason"] or isinstance(error, RefusedError)


def test_a_run_is_one_experiment_at_a_silo(tmp_path: Path) -> None:
    """Otherwise a private experiment could begin with what another one left, which was not private."""
    deployed(tmp_path, "rounds=1").run("first", "run-1")
    other = deployed(tmp_path, "rounds=1", "local.learning_rate=0.5")
    with pytest.raises(ShortRoundError, match="refused: silo 'mnist-0' knows run 'run-1' as another experiment"):
        other.run("second", "run-1")
    shutil.rmtree(other.home(1) / "runs")  # it is known from what is kept, too
    other.grid.offline.update(set(NAMES) - {BAD})
    other.rules = replace(other.rules, deadline=20.0)  # nobody else comes
    with pytest.raises(ShortRoundError, match="refused: silo 'mnist-1' knows run 'run-1' as another experiment"):
        other.run("third", "run-1")


@pytest.mark.parametrize("lost", ["egress.jsonl", "metrics.jsonl", ""])
def test_nothing_is_sent_again_without_its_line_in_the_silos_own_log(tmp_path: Path, lost: str) -> None:
    """A worker may have died after it had kept the update and before, or while, it wrote its report."""
    deployment, task = first_task(tmp_path, lambda *_: SECURE)
    first = deployment.service(1).answer(task)
    report = deployment.home(1) / "runs" / "run-1"
    before = {name: read_lines(report / name) for name in ("egress.jsonl", "metrics.jsonl")}
    assert [row["sha256"] for row in before["egress.jsonl"]] == [first.sha256]
    if lost:
        (report / lost).unlink()
    else:
        shutil.rmtree(report)
    assert deployment.service(1).answer(task) == first
    assert {name: read_lines(report / name) for name in before} == before


def test_what_has_left_stays_in_the_silos_own_log_when_a_round_is_done_again(tmp_path: Path) -> None:
    """A server that went back may come with another model: two updates of one round have left then."""
    deployment, task = first_task(tmp_path, lambda *_: SECURE)
    moved = {name: packed({k: t + 1e-3 for k, t in unpacked(p, name).items()}) for name, p in task.parts.items()}
    service = deployment.service(1)
    answers = [service.answer(frame) for frame in (task, replace(task, parts=moved))]
    report = deployment.home(1) / "runs" / "run-1"
    assert [row["sha256"] for row in read_lines(report / "egress.jsonl")] == [answer.sha256 for answer in answers]
    assert answers[0].sha256 != answers[1].sha256
    assert [row["round"] for row in read_lines(report / "metrics.jsonl")] == [1]


@pytest.mark.parametrize("run", ["", ".", "../../elsewhere", "/elsewhere", "a/b", "-a", "Run", "a" * 64])
def test_a_run_whose_name_is_no_folder_of_its_own_is_not_carried_out(tmp_path: Path, run: str) -> None:
    frame = Frame({"kind": "task", "version": fedloom.__version__, "run": run})
    with pytest.raises(FedloomError, match=f"run = '{re.escape(run)}' must be small letters, digits and '-'"):
        Order.of(frame)


def test_a_silo_that_lost_its_state_does_not_start_afresh(tmp_path: Path) -> None:
    deployment = deployed(tmp_path, "sharing.scopes={encoder='silo'}")
    silo = deployment.grid.handlers[BAD]

    def forgetful(frame: Frame) -> Frame:
        answer = silo(frame)
        shutil.rmtree(deployment.home(1) / "rounds")
        return answer

    deployment.grid.handlers[BAD] = forgetful
    deployment.run()
    assert deployment.told("refused") == [(2, BAD)]
    assert deployment.reasons("refused") == [
        "silo 'mnist-1' took part in round 1, but what it kept of it is gone: it cannot go on with round 2"
    ]


def test_silos_keep_only_what_the_server_may_ask_for_again(tmp_path: Path) -> None:
    deployment = deployed(tmp_path, "rounds=6", "engine.checkpoint_every=2", "engine.keep_checkpoints=1")
    deployment.run()
    # In round 6 the server can still go back to its checkpoint of round 4.
    assert RoundStore(deployment.home(0) / "rounds" / "run-1").rounds() == [4, 5, 6]
