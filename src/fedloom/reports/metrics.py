"""The sections about a run's numbers: tables of the newest, and a curve of each over rounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from fedloom.evaluation.metric import count_of, described, metric_title, reading_of
from fedloom.reports.charts import COLOURS, Series, line_chart, number
from fedloom.reports.facts import RunFacts
from fedloom.reports.figures import Listing
from fedloom.reports.logs import History, last
from fedloom.reports.parts import section_body
from fedloom.runs.metrics import TRAINING, family_of, is_metric, of_whom, sample_count, split_key, uncounted
from fedloom.templating import render

MOST_LINES = 24  # in one chart
MOST_COLUMNS = 8  # groups beside each other in a table
SILO = "/silo="
SPENT = "privacy/epsilon/max"


def metrics_body(facts: RunFacts) -> Markup:
    """The newest values, a column for each group and for silos a list of their own; and how they came about."""
    of_silos = [key for key in facts.metrics if is_metric(key) and SILO in key]
    of_groups = [key for key in facts.metrics if is_metric(key) and SILO not in key]
    columns = sorted(dict.fromkeys(split_key(key)[1] for key in of_groups), key=bool)  # all before any group
    if len(columns) > MOST_COLUMNS:
        newest, silos = _metrics_list(facts, of_groups + of_silos), _metrics_list(facts, [])
    else:
        newest, silos = _metrics_table(facts, of_groups, columns), _metrics_list(facts, of_silos)
    return section_body("metrics", {"newest": newest, "silos": silos, "curves": _curves(facts, training=False)})


def _metrics_table(facts: RunFacts, keys: Sequence[str], columns: Sequence[str]) -> Listing:
    headers = ("metric", *(column or "all" for column in columns), "n", "in round")
    rows = [row for metric, cells in sorted(_cells(facts, keys).items()) for row in _rows(metric, cells, columns)]
    return Listing(headers, rows, right=range(1, len(headers)))


Cell = tuple[int, str, int]  # number of samples, value, round


def _cells(facts: RunFacts, keys: Sequence[str]) -> dict[str, dict[str, list[Cell]]]:
    """By metric and by group: a value for each number of samples that it was computed from, the smallest first."""
    found: dict[str, dict[str, list[Cell]]] = {}
    for key in keys:
        metric, whose = split_key(uncounted(key))
        cell = (sample_count(key) or 0, number(last(facts.metrics[key])), max(facts.metrics[key]))
        found.setdefault(metric, {}).setdefault(whose, []).append(cell)
    return {metric: {whose: sorted(cells) for whose, cells in by.items()} for metric, by in found.items()}


def _rows(metric: str, cells: Mapping[str, Sequence[Cell]], columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """One row for a metric; more where it was computed from several numbers of samples."""
    for place in itertools.zip_longest(*(cells.get(column, []) for column in columns)):
        known = [cell for cell in place if cell]
        counts = " / ".join(f"{count:,}" for count in dict.fromkeys(cell[0] for cell in known))  # of all, of a group
        values = (cell[1] if cell else "" for cell in place)
        yield (metric_name(metric), *values, counts, str(max(cell[2] for cell in known)))


def _metrics_list(facts: RunFacts, keys: Sequence[str]) -> Listing:
    """A row for each key."""
    rows = []
    for key in sorted(keys, key=lambda key: split_key(key)[0]):
        history = facts.metrics[key]
        rows.append((metric_name(key), of_whom(key), count_of(key), number(last(history)), str(max(history))))
    return Listing(("metric", "of", "from", "newest value", "in round"), rows, right=(3, 4))


def training_body(facts: RunFacts) -> Markup | None:
    """Loss terms and costs over rounds; nothing where no two rounds have any."""
    curves = _curves(facts, training=True)
    return section_body("curves", {"curves": curves}) if curves else None


def _curves(facts: RunFacts, *, training: bool) -> list[tuple[str, Markup]]:
    """A chart for each metric, or each loss term and cost, that has more than one value."""
    colours = {name: place for place, name in enumerate(("", *facts.groups, *(silo.name for silo in facts.silos)))}
    families: dict[str, dict[str, list[Series]]] = {}
    for key, history in losses_first(facts.metrics):
        if is_metric(key) == training or len(history) < 2:
            continue
        metric, whose = split_key(uncounted(key))
        count = sample_count(key)
        name = f"{whose or 'all'} (n={count:,})" if count is not None else whose
        beside = families.setdefault(metric, {}).setdefault(whose, [])
        colour = colours.get(whose, 0) + COLOURS * len(beside)  # another number of samples: the colour, dashed
        beside.append(Series(name, points_of(key, history), colour))
    charts = []
    for family, by in families.items():
        lines = list(itertools.chain.from_iterable(by.values()))
        chart = line_chart(f"{curve_name(family)} over rounds", lines[:MOST_LINES], curve_name(family))
        charts.append((curve_name(family), chart))
    return charts


def quality_over_epsilon(facts: RunFacts) -> list[tuple[str, Markup]]:
    """What each round's epsilon bought: a chart for each metric of everybody that has a better side."""
    spent, charts = facts.metrics.get(SPENT, {}), []
    for key, history in facts.metrics.items():
        reading = reading_of(key)
        points = [(spent[x], y) for x, y in history.items() if spent.get(x) is not None]
        if reading and reading.better and not split_key(key)[1] and len(points) > 1:
            line = [Series("", [(x, y) for x, y in points if x is not None])]
            name = curve_name(family_of(key))
            chart = line_chart(f"{name} over epsilon spent", line, name, "epsilon spent", whole=False)
            charts.append((name, chart))
    return charts


def metric_name(key: str) -> Markup:
    """What people call a metric; whoever points at it is shown the key."""
    return render("reports/templates/metric.html", {"key": key, "title": metric_title(key)})


def losses_first(metrics: History) -> list[tuple[str, dict[int, float | None]]]:
    """Loss terms, then metrics, then costs such as seconds."""
    return sorted(metrics.items(), key=lambda item: (not item[0].startswith(TRAINING), not is_metric(item[0])))


def points_of(key: str, history: Mapping[int, float | None]) -> tuple[tuple[int, float | None], ...]:
    """A curve's points, bytes as megabytes."""
    scale = 1e-6 if key in ("bytes", "bytes_down") else 1.0
    return tuple((round_number, None if value is None else scale * value) for round_number, value in history.items())


def curve_name(key: str) -> str:
    """What people call a curve, with its unit where its key does not say it."""
    known = {
        SPENT: "epsilon spent",
        "seconds": "seconds a round",
        "steps": "steps a round",
        "bytes": "MB that left in a round",
        "bytes_down": "MB that silos were sent in a round",
    }
    return known.get(key) or (described(key) if is_metric(key) else key.removeprefix(TRAINING))
