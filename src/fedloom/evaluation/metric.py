"""A metric is one value: how it is computed, what it needs, and what people call the numbers that it gives."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

from fedloom.registry import Registry, values_in
from fedloom.runs.metrics import TRAINING, family_of, is_metric, of_whom, sample_count, split_key

if TYPE_CHECKING:
    from fedloom.evaluation.evidence import Evaluation, Real

FEW = 100  # samples: a rate from fewer is off by ten points easily
ACCOUNT = "privacy/"  # what was spent: it follows from settings
Values = dict[str, float]  # by full key


@dataclass(frozen=True)
class Need:
    """What a metric cannot do without."""

    met: Callable[[Evaluation], bool]
    reason: str  # why the metric is left out where it is not met
    check: Callable[[Real], object] = lambda _: None  # complains before a long training, not after it


@dataclass(frozen=True)
class Reading:
    """A kind of number that a metric gives, as people read it."""

    keys: str  # the ``<metric>/<variant>`` of its keys; what * stands for follows the title in brackets
    title: str
    better: Literal["higher", "lower"] | None = None  # None: neither, so no value wins
    counts: str = "samples"  # what the n of its keys counts, in the plural with s
    fewest: int = 0  # of them; from fewer it says little, and a report warns
    of_records: bool = True  # computed from records, held-out ones too: outside a privacy guarantee

    def variant(self, family: str) -> str | None:
        """What * stands for in a key without count and owner; None where the key is of another kind.

        >>> Reading("frechet/*", "Frechet distance").variant("frechet/pixels")
        'pixels'
        """
        found = self._pattern.fullmatch(family)
        return None if found is None else ", ".join(filter(None, found.groups()))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.keys).replace(r"\*", "(.*)"))


@dataclass(frozen=True)
class Metric:
    """A metric by the name that ``evaluation.metrics`` and ``--metrics`` take."""

    name: str
    compute: Callable[[Evaluation], Values]
    readings: tuple[Reading, ...]
    needs: tuple[Need, ...] = ()
    released: bool = False  # computed from what silos released alone: a server without any record can

    @property
    def summary(self) -> str:
        """The first line of what ``compute`` says about itself."""
        return (self.compute.__doc__ or "").strip().partition("\n")[0]

    def measure(self, evaluation: Evaluation) -> Values:
        """Its values; where something that it needs is missing none, and a warning says why."""
        for need in self.needs:
            if not need.met(evaluation):
                return evaluation.skip(self.name, need.reason)
        return self.compute(evaluation)


def _own() -> dict[str, Metric]:
    import fedloom.evaluation

    return values_in(fedloom.evaluation, "METRIC")


METRICS = Registry("metric", "fedloom.metrics", Metric, _own)


@cache
def _readings() -> tuple[Reading, ...]:
    """Of all metrics, those of plug-ins too; a plug-in that is broken is complained about once."""
    return tuple(reading for _, metric in METRICS.listed() for reading in metric.readings)


def reading_of(key: str) -> Reading | None:
    """What kind of number a key holds; None where no metric gives such keys, as of a package that is not here."""
    return _reading_of(family_of(key))


@lru_cache(4096)
def _reading_of(family: str) -> Reading | None:
    known = [reading for reading in _readings() if reading.variant(family) is not None]
    return max(known, key=lambda reading: len(reading.keys), default=None)  # the one that says most


def is_of_records(key: str) -> bool:
    """Whether a number was computed from records, which no privacy guarantee covers; of an unknown metric it was."""
    if key.startswith(TRAINING):
        return True
    reading = reading_of(key)
    return is_metric(key) and not key.startswith(ACCOUNT) and (reading is None or reading.of_records)


def metric_title(key: str) -> str:
    """What people call it, whoever it is of; the key itself where it is unknown."""
    reading, family = reading_of(key), family_of(key)
    if reading is None:
        return family
    variant = reading.variant(family)
    return f"{reading.title} ({variant})" if variant else reading.title


def count_of(key: str) -> str:
    """From how many of what it was computed; empty where the key does not say."""
    reading, count = reading_of(key), sample_count(key)
    if count is None:
        return ""
    if reading is None:
        return f"{count:,}"
    return f"{count:,} {reading.counts.removesuffix('s') if count == 1 else reading.counts}"


def described(key: str) -> str:
    """All that a key says, in words."""
    whose = of_whom(key) if split_key(key)[1] else ""
    return ", ".join(filter(None, (metric_title(key), whose, count_of(key))))


def best(key: str, values: Iterable[float | None]) -> float | None:
    """The better of some values; None where the metric has no better side, or all are the same."""
    known = {value for value in values if value is not None and math.isfinite(value)}
    reading = reading_of(key)
    if len(known) < 2 or reading is None or reading.better is None:
        return None
    return max(known) if reading.better == "higher" else min(known)
