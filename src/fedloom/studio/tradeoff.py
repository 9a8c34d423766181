"""What epsilon bought: runs that differ in nothing but their privacy and seed, quality over what they spent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from markupsafe import Markup

from fedloom.config import Config, EngineConfig, EvaluationConfig, PrivacyConfig
from fedloom.evaluation.metric import metric_title
from fedloom.privacy.summary import NONE
from fedloom.reports.charts import Series, line_chart, number
from fedloom.reports.figures import Listing
from fedloom.studio.run_summary import RunSummary


@dataclass(frozen=True)
class Tradeoff:
    """Runs of one configuration at several epsilons: a chart for each metric, and a line for each run."""

    title: str
    charts: Sequence[tuple[str, Markup]]
    runs: Listing  # the first cell is a summary


def tradeoffs(summaries: Iterable[RunSummary]) -> list[Tradeoff]:
    """Every family of runs in which at least two epsilons were spent."""
    families: dict[str, list[RunSummary]] = {}
    for one in summaries:
        if one.config is not None and any(best.newest is not None for best in one.best):
            families.setdefault(_kin(one.config), []).append(one)
    return [_tradeoff(family) for family in families.values() if len(_epsilons(family)) > 1]


def _kin(config: Config) -> str:
    """What the runs of a family have in common."""
    usual = {"name": "", "seed": 0, "privacy": PrivacyConfig(), "engine": EngineConfig()}
    return repr(replace(config, evaluation=EvaluationConfig(), **usual))  # type: ignore[arg-type]


def _epsilons(family: Iterable[RunSummary]) -> set[float]:
    return {one.epsilon for one in family if one.epsilon is not None}


def _tradeoff(family: Sequence[RunSummary]) -> Tradeoff:
    order = sorted(family, key=lambda one: (one.epsilon is None, one.epsilon or 0.0, one.entry.name))
    metrics = list(dict.fromkeys(best.metric for one in order for best in one.best if best.newest is not None))
    rows = [(one, one.privacy, *(_told(_newest(one, metric)) for metric in metrics)) for one in order]
    headers = ("run", "privacy", *map(metric_title, metrics))
    charts = [(metric_title(metric), _chart(order, metric)) for metric in metrics]
    return Tradeoff(
        f"{order[0].method} on {order[0].data}", charts, Listing(headers, rows, right=range(2, len(headers)))
    )


def _chart(family: Sequence[RunSummary], metric: str) -> Markup:
    """The mean over runs that spent the same; beside it, what comes out without privacy."""
    epsilons = sorted(_epsilons(family))
    private = [(epsilon, _mean(family, metric, epsilon)) for epsilon in epsilons]
    series = [Series("with privacy", private)]
    free = _mean([one for one in family if one.privacy == NONE], metric, None)
    if free is not None:
        series.append(Series(NONE, [(epsilon, free) for epsilon in (epsilons[0], epsilons[-1])], 1))
    title = metric_title(metric)
    return line_chart(f"{title} over epsilon spent", series, title, "epsilon spent", whole=False)


def _mean(family: Iterable[RunSummary], metric: str, epsilon: float | None) -> float | None:
    found = [_newest(one, metric) for one in family if one.epsilon == epsilon]
    known = [value for value in found if value is not None]
    return fmean(known) if known else None


def _newest(one: RunSummary, metric: str) -> float | None:
    return next((best.newest for best in one.best if best.metric == metric), None)


def _told(value: float | None) -> str:
    return "-" if value is None else number(value)
