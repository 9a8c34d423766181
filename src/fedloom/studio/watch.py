"""One look at the runs folder a second, shared by everybody who watches, and none while nobody does."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

from fedloom.studio.catalogue import Catalogue, FoundRun
from fedloom.studio.glance import Glance, glance_at, stamp_of

TICK = 1.0  # seconds
NAP = 0.1  # seconds after which one who waits for the next look sees that the studio ends
HEARTBEAT = 15.0  # seconds after which silence is broken, so that a closed connection is noticed
MOST_WATCHERS = 32


@dataclass(frozen=True)
class Sight:
    """A run as it stands, with its state at that moment."""

    glance: Glance
    state: str


@dataclass
class RunWatch:
    """What is known about every run; read again only where its files have changed."""

    catalogue: Catalogue
    tick: float = TICK
    watchers: int = 0
    closed: bool = False
    _known: dict[str, Glance] = field(default_factory=dict)
    _looked: float = -math.inf  # not yet; a clock may have begun a moment ago
    _sights: dict[str, Sight] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def look(self) -> dict[str, Sight]:
        """Every run by its key."""
        sights = {key: self.sight(entry) for key, entry in self.catalogue.entries().items()}
        self._known = {key: sight.glance for key, sight in sights.items()}
        return sights

    def sight(self, entry: FoundRun) -> Sight:
        """One run, read anew where its files have changed."""
        known = self._known.get(entry.key)
        glance = known if known is not None and known.stamp == stamp_of(entry.path)[0] else glance_at(entry)
        return Sight(glance, glance.state(time.time()))

    async def shared_look(self) -> dict[str, Sight]:
        """The same, at most once a tick, whoever asks."""
        async with self._lock:
            if time.monotonic() - self._looked >= self.tick:
                self._sights = await asyncio.to_thread(self.look)
                self._looked = time.monotonic()
            return self._sights

    async def changes(self, keys: Collection[str] = ()) -> AsyncIterator[tuple[str, Sight | None] | None]:
        """All runs first, or those with ``keys``, then each that changes; None for one gone, and None to say nothing.

        Who stops listening closes the iterator.
        """
        self.watchers += 1
        shown: dict[str, Sight] = {}
        spoke = time.monotonic()
        try:
            while not self.closed:
                sights = await self.shared_look()
                seen = {key: sight for key, sight in sights.items() if not keys or key in keys}
                events: list[tuple[str, Sight | None]] = [
                    (key, sight) for key, sight in seen.items() if shown.get(key) != sight
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
