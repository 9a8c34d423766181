"""One look at the runs folder a second, shared by everybody who watches, and none while nobody does."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

from fedloom.studio.catalogue import Catalogue, FoundRun
from fedloom.studio.run_summary import RunSummary, run_summary_of, stamp_of

TICK = 1.0  # seconds
NAP = 0.1  # seconds after which one who waits for the next look sees that the studio ends
HEARTBEAT = 15.0  # seconds after which silence is broken, so that a closed connection is noticed
MOST_WATCHERS = 32


@dataclass(frozen=True)
class LiveRun:
    """A run as it stands, with its state at that moment."""

    summary: RunSummary
    state: str


@dataclass
class RunWatch:
    """What is known about every run; read again only where its files have changed."""

    catalogue: Catalogue
    tick: float = TICK
    watchers: int = 0
    closed: bool = False
    _known: dict[str, RunSummary] = field(default_factory=dict)
    _looked: float = -math.inf  # not yet; a clock may have begun a moment ago
    _sights: dict[str, LiveRun] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def look(self) -> dict[str, LiveRun]:
        """Every run by its key."""
        live_runs = {key: self.live_run(entry) for key, entry in self.catalogue.entries().items()}
        self._known = {key: live_run.summary for key, live_run in live_runs.items()}
        return live_runs

    def live_run(self, entry: FoundRun) -> LiveRun:
        """One run, read anew where its files have changed."""
        known = self._known.get(entry.key)
        summary = known if known is not None and known.stamp == stamp_of(entry.path)[0] else run_summary_of(entry)
        return LiveRun(summary, summary.state(time.time()))

    async def shared_look(self) -> dict[str, LiveRun]:
        """The same, at most once a tick, whoever asks."""
        async with self._lock:
            if time.monotonic() - self._looked >= self.tick:
                self._sights = await asyncio.to_thread(self.look)
                self._looked = time.monotonic()
            return self._sights

    async def changes(self, keys: Collection[str] = ()) -> AsyncIterator[tuple[str, LiveRun | None] | None]:
        """All runs first, or those with ``keys``, then each that changes; None for one gone, and None to say nothing.

        Who stops listening closes the iterator.
        """
        self.watchers += 1
        shown: dict[str, LiveRun] = {}
        spoke = time.monotonic()
        try:
            while not self.closed:
                live_runs = await self.shared_look()
                seen = {key: live_run for key, live_run in live_runs.items() if not keys or key in keys}
                events: list[tuple[str, LiveRun | None]] = [
                    (key, live_run) for key, live_run in seen.items() if shown.get(key) != live_run
                ]
                events += [(key, None) for key in shown if key not in seen]
                for event in events:
                    yield event
                shown = seen
                if events:
                    spoke = time.monotonic()
                elif time.monotonic() - spoke >= HEARTBEAT:
                    yield None
                    spoke = time.monotonic()
                await self._rest()
        finally:
            self.watchers -= 1

    async def _rest(self) -> None:
        """Until the next look is due, or the studio ends: it does not wait long for its streams."""
        end = time.monotonic() + self.tick
        while not self.closed and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, NAP))
