"""Ranks as threads of this process, whose frames pass through bytes: quick to start, and as deaf to each other."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fedloom.config import Config
from fedloom.engines.pieces import Divisible
from fedloom.engines.ranked import RankedEngine, dismiss, follow
from fedloom.engines.ranks import LEADER
from fedloom.engines.remote.frames import Frame
from fedloom.experiment.on_ranks import Leader, follow_leader
from fedloom.runs.stacks import Overflow

PATIENCE = 60.0  # seconds until a frame that never comes fails a test
Pipes = dict[tuple[int, int], "queue.Queue[bytes]"]


@dataclass(frozen=True)
class ThreadRanks:
    """What one of the threads sees; ``asked`` has the kinds of frames that it told."""

    rank: int
    size: int
    pipes: Pipes
    asked: list[str] = field(default_factory=list)

    def tell(self, rank: int, frame: Frame) -> None:
        self.asked.append(frame.kind)
        self.pipes[self.rank, rank].put(frame.to_bytes())

    def hear(self, rank: int) -> Frame:
        return Frame.of_bytes(self.pipes[rank, self.rank].get(timeout=PATIENCE))


def threads(size: int) -> list[ThreadRanks]:
    """So many ranks."""
    pipes: Pipes = {(one, other): queue.Queue() for one in range(size) for other in range(size)}
    return [ThreadRanks(rank, size, pipes) for rank in range(size)]


@contextmanager
def ranked(make: Callable[[], Divisible], size: int, folder: Path) -> Iterator[tuple[RankedEngine, ThreadRanks]]:
    """The leader's engine, while the other ranks follow it with engines of their own."""
    ranks = threads(size)
    with ThreadPoolExecutor(size) as pool:
        followers = [
            pool.submit(follow, each, make(), Overflow(folder / f"rank-{each.rank}", 20_000)) for each in ranks[1:]
        ]
        engine = RankedEngine(make(), ranks[LEADER])
        try:
            yield engine, ranks[LEADER]
        finally:
            dismiss(ranks[LEADER])
            engine.close()
            for follower in followers:
                follower.result(PATIENCE)


@contextmanager
def led(size: int, given: Callable[[int], Config | None] = lambda _: None) -> Iterator[Leader]:
    """Rank 0 of a run, while the others follow it, each of which was ``given`` a configuration."""
    ranks = threads(size)
    with ThreadPoolExecutor(size) as pool:
        followers = [pool.submit(follow_leader, each, partial(given, each.rank)) for each in ranks[1:]]
        try:
            yield Leader(ranks[LEADER])
        finally:
            dismiss(ranks[LEADER])
            for follower in followers:
                follower.result(PATIENCE)
