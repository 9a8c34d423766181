"""The parts that pages are put together from: plain values here, their markup in templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from fedloom.reports.facts import RunFacts
from fedloom.reports.figures import Panel
from fedloom.reports.findings import Finding
from fedloom.reports.pictures import Samples
from fedloom.templating import render


@dataclass(frozen=True)
class Story:
    """All that a page tells about one run."""

    facts: RunFacts
    findings: Sequence[Finding]
    samples: Samples
    panels: Mapping[str, Panel]
    real: Mapping[str, str] = field(default_factory=dict)  # a grid of held-out records of each group
    no_real: str = ""  # why there are none, where a page may say so


@dataclass(frozen=True)
class Section:
    """A heading that the navigation leads to, and what stands under it."""

    anchor: str
    title: str
    body: Markup


def section_body(name: str, values: Mapping[str, object]) -> Markup:
    """What stands in a section, by the name of its template."""
    return render(f"reports/templates/sections/{name}.html", values)


def title_of(facts: RunFacts) -> str:
    """What a page about one run is called."""
    return f"{facts.name}: {method_of(facts)}"


def method_of(facts: RunFacts) -> str:
    """The method with its options."""
    options = ", ".join(f"{name}={json.dumps(value, default=str)}" for name, value in facts.options.items())
    return f"{facts.method} ({options})" if options else facts.method


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def sample_films(stories: Sequence[Story]) -> Markup:
    """The grids of all runs, moved by one slider: group after group, and within a group run beside run."""
    rows = {"": stories[0].samples.films}
    if len(stories) > 1:
        groups = dict.fromkeys(group for story in stories for group in story.samples.films)
        rows = {
            group: {one.facts.label: one.samples.films[group] for one in stories if group in one.samples.films}
            for group in groups
        }
    values = {
        "rounds": sorted({number for films in rows.values() for film in films.values() for number in film}),
        "rows": rows,
        "real": {group: picture for story in stories for group, picture in story.real.items()},
        "no_real": next((story.no_real for story in stories if story.no_real), ""),
        "broken": [file for story in stories for file in story.samples.broken][:5],
    }
    return section_body("samples", values)
