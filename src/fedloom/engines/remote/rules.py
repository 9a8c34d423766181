"""The rules of a round: how long it waits, for whom, and what it does without."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedloom.settings import above, at_least


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """How long a round waits, for whom, and what it does without; times are in seconds."""

    deadline: float = field(default=3600.0, metadata=above(0))  # after which a round goes on without those who lack
    # For silos that are not there at all, and once for those that have yet to answer an earlier round.
    grace: float = field(default=180.0, metadata=at_least(0))
    minimum: int = field(default=1, metadata=at_least(1))  # updates, or as many as were drawn if those are fewer
    extensions: int = field(default=3, metadata=at_least(0))  # further deadlines that a round waits for its minimum
    attempts: int = field(default=3, metadata=at_least(1))  # how often a silo that fails, or is silent, is asked
    resend: float = field(default=600.0, metadata=above(0))  # after which a silo that is there, but silent, is asked
    # What becomes of an update that comes after its round: nothing, or it counts in the round under way, for which its
    # silo is then not asked, or may not even be drawn.
    stragglers: Literal["drop", "use"] = "drop"
    patience: float = field(default=10.0, metadata=at_least(1))  # deadlines after which a straggler is given up
    # That a silo is believed to hold where the charter declares nothing; all silos weigh the same then.
    max_records: int = field(default=10**7, metadata=at_least(1))
    norm_factor: float = field(default=5.0, metadata=at_least(0))  # times the others' norm that is too much; 0: never
