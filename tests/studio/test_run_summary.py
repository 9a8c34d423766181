"""Runs in one line, and how they change while somebody watches."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from fedloom.reproduction.tables import identity
from fedloom.runs.folder import RunFolder
from fedloom.studio import watch as watching
from fedloom.studio.catalogue import Catalogue, FoundRun
from fedloom.studio.run_summary import Best, RunSummary, run_summary_of
from fedloom.studio.watch import LiveRun, RunWatch
from support import tiny_config


@pytest.fixture
def entry(tmp_path: Path) -> FoundRun:
    """A run of three rounds that has only begun."""
    RunFolder.create(tmp_path / "run", tiny_config("rounds=3", "seed=7"))
    return FoundRun("key", "run", tmp_path / "run")


def log(entry: FoundRun, *rows: dict[str, Any]) -> None:
    with (entry.path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_run_that_has_only_begun(entry: FoundRun) -> None:
    found = run_summary_of(entry)
    assert (found.title, found.method, found.data, found.seed) == ("demo", "fissionvae", "mixed-mnist-sample", "7")
    assert (found.rounds_done, found.rounds_planned, found.seconds, found.seconds_left) == (0, 3, None, None)
    assert (found.best, found.privacy, found.problem) == ((), "no DP guarantee", "")
    assert found.state(time.time()) == "running"


def test_the_best_value_is_looked_for_in_all_rounds_as_mean_over_groups(entry: FoundRun) -> None:
    hits = {"domain-hit/cnn/n9/group=a": 0.5, "domain-hit/cnn/n9/group=b": 0.9}
    log(
        entry,
        {"round": 1, "seconds": 5.0, "train/kl": 3.0, **hits, "frechet/x/n9": 7.0, "spread/pixels/n9": 1.0},
        {"round": 2, "seconds": 4.0, "domain-hit/cnn/n9/group=a": 1.0, "frechet/x/n9": 8.0},  # b is missing
        {"round": 2, "frechet/x/n9/silo=s": 0.1, "domain-hit/cnn-prior-of-b/n9": 2.0, "blend/cnn/n9": 0.2},
    )
    found = run_summary_of(entry)
    assert found.best == (Best("frechet/x", 7.0, 1), Best("domain-hit/cnn", 0.7, 1))
    assert (found.rounds_done, found.seconds, found.seconds_left) == (2, None, None)


def test_without_a_metric_that_has_a_better_side_the_newest_loss_stands_in(entry: FoundRun) -> None:
    log(entry, {"round": 1, "seconds": 4.0, "train/nll": 9.0}, {"round": 2, "seconds": 6.0, "train/nll": 8.0})
    found = run_summary_of(entry)
    assert found.best == (Best("nll", 8.0, 2),)
    assert (found.seconds, found.seconds_left) == (6.0, 6.0)


def test_epsilon_is_what_was_spent_rounded_up(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", tiny_config("privacy.mechanism=dp-sgd", "privacy.epsilon=8"))
    entry = FoundRun("key", "run", tmp_path / "run")
    assert run_summary_of(entry).privacy == "nothing spent yet"
    log(entry, {"round": 1, "privacy/epsilon/max": 2.00001})
    assert run_summary_of(entry).privacy == "ε 2.001"


@pytest.mark.parametrize(
    ("ended", "seconds", "silence", "state"),
    [
        ("", None, 119, "running"),
        ("", None, 121, "silent"),
        ("", 60.0, 239, "running"),  # four rounds of a minute
        ("", 60.0, 241, "silent"),
        ("finished", None, 1e6, "finished"),
        ("diverged", None, 0, "diverged"),
    ],
)
def test_a_run_lives_while_there_are_signs_of_life(
    ended: str, seconds: float | None, silence: float, state: str
) -> None:
    summary = RunSummary(FoundRun("", "", Path()), "", changed=1000.0, ended=ended, seconds=seconds)
    assert summary.state(1000.0 + silence) == state


def test_a_run_is_known_by_its_settings_with_and_without_where_its_data_lie(tmp_path: Path) -> None:
    """Whatever its name and seed."""
    RunFolder.create(tmp_path / "run", tiny_config("seed=3", "name=other", "data.path=here"))
    found = run_summary_of(FoundRun("key", "run", tmp_path / "run")).identities
    assert found == {identity(tiny_config()), identity(tiny_config("data.path=here"))}
    assert len(found) == 2


def test_how_it_ended_is_read(entry: FoundRun) -> None:
    RunFolder.open(entry.path).end("diverged", 2, "a loss that is not finite")
    assert run_summary_of(entry).state(time.time()) == "diverged"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.toml", b"nonsense", "is not valid TOML"),
        ("run.toml", b'wonders = "many"', "unknown key 'wonders'"),
        ("run.toml", f"seed = 0x{'f' * 5000}".encode(), "integer string conversion"),
        ("status.json", b"{", "status.json is damaged"),
        *(
            ("status.json", content, "status.json is damaged: its state must be one of finished, diverged")
            for content in (b"[1]", b"3", b"null", b'"x"', b"{}", b'{"state": ["finished"]}', b'{"state": "<b>"}')
        ),
        ("status.json", b"[" * 100_000, "recursion"),
        ("metrics.jsonl", b"\xff\xfe", "invalid start byte"),
        ("metrics.jsonl", b"[" * 100_000, "recursion"),
        # A sum beyond all numbers, which no reader of logs could know of.
        (
            "metrics.jsonl",
            b'{"round": 1, "frechet/x/n9/group=a": 1e308, "frechet/x/n9/group=b": 1e308}',
            "run 'run' cannot be read (OverflowError: ",
        ),
    ],
)
def test_what_is_wrong_with_a_run_is_one_sentence(entry: FoundRun, name: str, content: bytes, words: str) -> None:
    (entry.path / name).write_bytes(content)
    found = run_summary_of(entry)
    assert words in found.problem
    assert "\n" not in found.problem
    assert found.state(time.time()) == "unreadable"


def test_no_number_of_rounds_is_too_large_to_wait_for(entry: FoundRun) -> None:
    toml = entry.path / "run.toml"
    toml.write_text(toml.read_text().replace("rounds = 3\n", f"rounds = {'9' * 400}\n"))
    log(entry, {"round": 1, "seconds": 4.0})
    found = run_summary_of(entry)
    assert (found.rounds_planned, found.seconds, found.seconds_left) == (10**400 - 1, 4.0, None)


@pytest.fixture
def watch(entry: FoundRun) -> RunWatch:
    """A watch without patience."""
    return RunWatch(Catalogue(entry.path.parent), tick=0.0)


async def heard(watch: RunWatch, *acts: Any, keys: tuple[str, ...] = ()) -> list[tuple[str, LiveRun | None] | None]:
    """The first event, and the next after each act."""
    changes = watch.changes(keys)
    events = [await anext(changes)]
    for act in acts:
        assert watch.watchers == 1
        act()
        events.append(await anext(changes))
    await changes.aclose()
    return events


def test_whoever_watches_hears_of_every_change_and_of_nothing_else(entry: FoundRun, watch: RunWatch) -> None:
    folder = RunFolder.open(entry.path)
    events = asyncio.run(
        heard(
            watch,
            lambda: log(entry, {"round": 1, "seconds": 1.0}),
            lambda: folder.end("finished", 3),
            lambda: entry.path.rename(entry.path.with_name("moved")),
        )
    )
    live_runs = [event[1] for event in events if event is not None]
    assert [live_run.state if live_run else None for live_run in live_runs] == [
        "running",
        "running",
        "finished",
        "finished",
    ]
    assert [live_run.summary.rounds_done for live_run in live_runs if live_run] == [0, 1, 1, 1]
    assert live_runs[-1] is not None
    assert live_runs[-1].summary.entry.name == "moved"
    assert watch.watchers == 0


def test_a_run_that_is_gone_is_said_to_be(entry: FoundRun, watch: RunWatch) -> None:
    (key,) = watch.catalogue.entries()
    events = asyncio.run(heard(watch, lambda: (entry.path / "run.toml").unlink(), keys=(key,)))
    assert events[1] == (key, None)


def test_a_run_is_read_again_only_when_it_has_changed(
    entry: FoundRun, watch: RunWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(watching, "run_summary_of", lambda one: read.append(one.name) or run_summary_of(one))
    for _ in range(3):
        watch.look()
    assert read == ["run"]
    log(entry, {"round": 1})
    watch.look()
    assert read == ["run", "run"]


def test_all_who_watch_share_one_look(entry: FoundRun, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, looks = RunWatch(Catalogue(entry.path.parent), tick=math.inf), []
    look = RunWatch.look
    monkeypatch.setattr(RunWatch, "look", lambda self: looks.append(1) or look(self))

    async def crowd() -> None:
        everybody = [watch.changes() for _ in range(5)]
        events = await asyncio.gather(*(anext(one) for one in everybody))
        assert len(set(events)) == 1
        for one in everybody:
            await one.aclose()

    asyncio.run(crowd())
    assert looks == [1]


def test_silence_is_broken_now_and_then_and_ends_when_the_studio_does(
    entry: FoundRun, watch: RunWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "HEARTBEAT", 0.0)

    async def listen() -> list[Any]:
        events = []
        async for event in watch.changes():
            events.append(event)
            watch.closed = len(events) == 3
        return events

    events = asyncio.run(listen())
    assert events[1:] == [None, None]


def test_a_stream_that_rests_ends_with_the_studio_and_not_after_the_next_look(entry: FoundRun) -> None:
    watch = RunWatch(Catalogue(entry.path.parent), tick=math.inf)

    async def listen() -> list[Any]:
        stream = watch.changes()
        first = await anext(stream)
        asyncio.get_running_loop().call_later(0.05, setattr, watch, "closed", True)
        return [first, await asyncio.wait_for(anext(stream, "the end"), 60)]

    assert asyncio.run(listen())[1] == "the end"


def test_a_file_that_is_put_back_with_its_old_time_is_noticed(entry: FoundRun, watch: RunWatch) -> None:
    log(entry, {"round": 1})
    before = watch.look()
    other, file = entry.path / "other", entry.path / "metrics.jsonl"
    found = file.stat()
    other.write_text(file.read_text().replace("1", "2"))
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(file)
    after = watch.look()
    assert [live_run.summary.rounds_done for live_run in (*before.values(), *after.values())] == [1, 2]
