"""Who takes part in a round: a public draw that depends on nothing but the seed and the round's number."""

from __future__ import annotations

from fedloom.config import ParticipationConfig
from fedloom.streams import Streams


def participants(config: ParticipationConfig, silos: int, round: int, streams: Streams) -> tuple[int, ...]:
    """The silos of a round, sorted; under ``bernoulli`` each tosses its own coin, so there may be none."""
    if config.mode == "bernoulli":
        return tuple(streams.heads("participation", silos, config.rate, round=round).tolist())
    count = max(1, int(config.rate * silos + 0.5))  # the nearest whole number, halves up: 2.5 silos are 3
    return tuple(sorted(streams.chosen("participation", silos, count, round=round).tolist()))
