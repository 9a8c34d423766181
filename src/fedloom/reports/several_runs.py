"""The sections that compare runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedloom.reports.charts import Series, line_chart, number
from fedloom.reports.logs import last, sample_count, uncounted
from fedloom.reports.one_run import MOST_LINES
from fedloom.reports.parts import (
    Section,
    Story,
    curve_name,
    figure_grid,
    finding_list,
    losses_first,
    method_of,
    points_of,
    sample_films,
    text,
)
from fedloom.runs.metrics import best, is_metric, split_key


def comparison_sections(stories: Sequence[Story]) -> list[Section]:
    """Metrics, samples and curves side by side; each run's own part follows."""
    warned = "".join(
        f"<h3>{text(story.facts.label)}: {text(method_of(story.facts))}</h3>{finding_list(story.findings)}"
        for story in stories
    )
    return [
        Section("metrics", "Metrics", _comparison_table(stories)),
        Section("samples", "Samples, round by round", sample_films(stories)),
        Section("warnings", "Warnings", warned),
        Section("curves", "Curves", _overlaid(stories)),
    ]


def comparison(stories: Sequence[Story]) -> dict[str, dict[str, float | None]]:
    """The newest value of every metric that some run has: key -> run -> value."""
    keys = dict.fromkeys(key for story in stories for key in story.facts.metrics if is_metric(key))
    return {
        key: {story.facts.label: last(story.facts.metrics.get(key, {})) for story in stories}
        for key in sorted(keys, key=lambda key: (split_key(uncounted(key))[0], sample_count(key) or 0))
    }


def _comparison_table(stories: Sequence[Story]) -> str:
    """What at least two runs have in common; the rest, and the silos', one click away."""
    values = comparison(stories)
    if not values:
        return "<p>None of the runs has a metric yet.</p>"
    shared = {
        k: v for k, v in values.items() if "/silo=" not in k and len([x for x in v.values() if x is not None]) > 1
    }
    rest = {key: found for key, found in values.items() if key not in shared}
    labels = [story.facts.label for story in stories]
    intro = "<p>Newest values; a star marks the better one, where a metric has a better side.</p>"
    common = _rows_of(shared, labels) if shared else "<p>No metric was computed in two of the runs.</p>"
    more = "Metrics of single runs and of silos"
    return f"{intro}{common}" + (
        f"<details><summary>{more}</summary>{_rows_of(rest, labels)}</details>" if rest else ""
    )


def _rows_of(values: Mapping[str, Mapping[str, float | None]], labels: Sequence[str]) -> str:
    rows = []
    for key, found in values.items():
        metric, whose = split_key(key)
        better = best(key, found.values())
        cells = [
            f'<td class="n{" best" if value is not None and value == better else ""}">'
            f"{'-' if value is None else number(value)}</td>"
            for value in found.values()
        ]
        rows.append(f'<tr><td class="key">{text(metric)}</td><td>{text(whose or "all")}</td>{"".join(cells)}</tr>')
    heads = "".join(f'<th class="n">{text(label)}</th>' for label in labels)
    return (
        f'<div class="wide"><table><thead><tr><th>metric</th><th>of</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _overlaid(stories: Sequence[Story]) -> str:
    """A chart for each metric and group with a line for each run."""
    charts: dict[str, list[Series]] = {}
    for colour, story in enumerate(stories):
        for key, history in losses_first(story.facts.metrics):
            if len(history) > 1:
                charts.setdefault(key, []).append(Series(story.facts.label, points_of(key, history), colour))
    return figure_grid(
        [
            f"<figcaption><b>{text(curve_name(key))}</b></figcaption>"
            + line_chart(f"{key} over rounds", series[:MOST_LINES], curve_name(split_key(uncounted(key))[0]))
            for key, series in charts.items()
        ]
    )
