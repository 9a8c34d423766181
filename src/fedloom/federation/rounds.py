"""What everybody in a round may know about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundContext:
    """One round: its number (from 1), how many there are in all, and which silos take part."""

    round: int
    rounds: int
    participants: tuple[int, ...]


@dataclass(frozen=True)
class Site:
    """For whom a model is built: a silo or the server, and the groups whose records it meets."""

    name: str
    groups: tuple[int, ...]
