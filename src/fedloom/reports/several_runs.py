"""The sections that compare runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from fedloom.evaluation.metric import best, count_of
from fedloom.reports.charts import Series, line_chart, number
from fedloom.reports.figures import Listing
from fedloom.reports.logs import last
from fedloom.reports.metrics import MOST_LINES, curve_name, losses_first, metric_name, points_of
from fedloom.reports.parts import Section, Story, method_of, sample_films, section_body
from fedloom.runs.metrics import family_of, is_metric, of_whom, sample_count
from fedloom.templating import render


def verdicts(stories: Sequence[Story]) -> Markup:
    """What to think of each run."""
    found = [(story.facts.label, story.facts.verdict) for story in stories]
    return render("reports/templates/verdicts.html", {"verdicts": found})


def comparison_sections(stories: Sequence[Story]) -> list[Section]:
    """Metrics, samples and curves side by side; each run's own part follows."""
    differing = section_body("differences", {"settings": _differences(stories)})
    warned = [(f"{story.facts.label}: {method_of(story.facts)}", story.findings) for story in stories]
    return [
        Section("metrics", "Metrics", _metrics(stories)),
        Section("differences", "What differs", differing),
        Section("samples", "Samples, round by round", sample_films(stories)),
        Section("warnings", "Warnings", section_body("warnings", {"runs": warned})),
        Section("curves", "Curves", section_body("curves", {"curves": _overlaid(stories)})),
    ]


def comparison(stories: Sequence[Story]) -> dict[str, dict[str, float | None]]:
    """The newest value of every metric that some run has: key -> run -> value."""
    keys = dict.fromkeys(key for story in stories for key in story.facts.metrics if is_metric(key))
    return {
        key: {story.facts.label: last(story.facts.metrics.get(key, {})) for story in stories}
        for key in sorted(keys, key=lambda key: (family_of(key), sample_count(key) or 0))
    }


def _metrics(stories: Sequence[Story]) -> Markup:
    """What at least two runs have in common; the rest, and the silos', one click away."""
    values, labels = comparison(stories), [story.facts.label for story in stories]
    shared = {
        k: v for k, v in values.items() if "/silo=" not in k and len([x for x in v.values() if x is not None]) > 1
    }
    rest = {key: found for key, found in values.items() if key not in shared}
    return section_body("comparison", {"shared": _table(shared, labels), "rest": _table(rest, labels)})


def _table(values: Mapping[str, Mapping[str, float | None]], labels: Sequence[str]) -> Listing:
    """A row for each metric, a column for each run."""
    rows, stars = [], set()
    for place, (key, found) in enumerate(values.items()):
        better = best(key, found.values())
        stars |= {(place, i) for i, value in enumerate(found.values(), 3) if value is not None and value == better}
        values_of_runs = ("-" if value is None else number(value) for value in found.values())
        rows.append((metric_name(key), of_whom(key), count_of(key), *values_of_runs))
    headers = ("metric", "of", "from", *labels)
    return Listing(headers, rows, right=range(3, len(headers)), best=stars)


def _differences(stories: Sequence[Story]) -> Listing:
    """Settings in which the runs are not alike, a column for each run."""
    settings = [dict(_leaves(story.facts.config)) for story in stories]
    keys = dict.fromkeys(key for found in settings for key in found)
    rows = [(key, *(found.get(key, "-") for found in settings)) for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return Listing(("setting", *(story.facts.label for story in stories)), differing)


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Every single setting by its full key, as TOML would have it."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield path + key, json.dumps(value, ensure_ascii=False, default=str)


def _overlaid(stories: Sequence[Story]) -> list[tuple[str, Markup]]:
    """A chart for each metric and group with a line for each run."""
    charts: dict[str, list[Series]] = {}
    for colour, story in enumerate(stories):
        for key, history in losses_first(story.facts.metrics):
            if len(history) > 1:
                charts.setdefault(key, []).append(Series(story.facts.label, points_of(key, history), colour))
    return [
        (
            curve_name(key),
            line_chart(f"{curve_name(key)} over rounds", series[:MOST_LINES], curve_name(family_of(key))),
        )
        for key, series in charts.items()
    ]
