"""The studio's pages: what they say, in plain values for their templates; numbers and charts are the report's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

import fedloom
from fedloom.reports.one_run import run_heading, run_sections
from fedloom.reports.parts import Story, method_of
from fedloom.reports.several_runs import comparison_sections
from fedloom.studio.explorer import REACH, Explorer, View
from fedloom.studio.glance import Glance
from fedloom.studio.papers import declared, parts_of_table, tables_by_paper
from fedloom.studio.watch import Sight
from fedloom.templating import render

MOST_COMPARED = 8
# Rounds and state stand above the part that is renewed, and records are not loaded.
NO_CARDS = ("rounds", "state", "training records")


def part(name: str, values: Mapping[str, object]) -> Markup:
    """A part of a page, by the name of its template."""
    return render(f"studio/templates/{name}.html", values)


def page(name: str, title: str, values: Mapping[str, object], here: str = "") -> str:
    """A whole document by the name of its template; ``here`` is where its place in the navigation leads."""
    return f"{part(name, {'title': title, 'here': here, 'version': fedloom.__version__, **values})}\n"


def error_page(sentence: str) -> str:
    """One sentence, and the way back."""
    return page("error", "Not shown", {"sentence": sentence})


# The runs at a glance


def runs_page(folder: str, sights: Mapping[str, Sight]) -> str:
    """A line for each run, the newest first."""
    order = sorted(sights.values(), key=lambda sight: -sight.glance.changed)
    return page("runs", "Runs", {"folder": folder, "sights": order, "most_compared": MOST_COMPARED}, here="/")


def run_row(sight: Sight) -> str:
    """A run's line."""
    return part("row", {"glance": sight.glance, "state": sight.state})


def progress(glance: Glance) -> str:
    """How far a run is, and how long it may take yet."""
    return part("progress", {"glance": glance})


def state_mark(state: str) -> str:
    """A state by its sign and its word."""
    return part("state", {"state": state})


# One run, and several compared


def run_page(sight: Sight, story: Story) -> str:
    """Everything about a run; it is renewed while the run goes on."""
    glance = sight.glance
    values = {
        "glance": glance,
        "state": sight.state,
        "method": method_of(story.facts),
        "address": f"/runs/{glance.entry.key}/body",
        "sights": [sight],
    }
    return page("run", glance.entry.name, values | _run_body(story))


def run_body(story: Story) -> str:
    """The part of a run's page that changes as it goes on."""
    return part("body", _run_body(story))


def _run_body(story: Story) -> dict[str, object]:
    return {"heading": run_heading(story, NO_CARDS), "found": run_sections(story, "", with_samples=True)}


def compare_page(sights: Sequence[Sight], stories: Sequence[Story]) -> str:
    """Runs side by side."""
    keys = [sight.glance.entry.key for sight in sights]
    values = {
        "names": {key: story.facts.label for key, story in zip(keys, stories, strict=True)},
        "address": "/compare/body?" + "&".join(f"run={key}" for key in keys),
        "sights": sights,
    }
    return page("compare", "Runs compared", values | _compare_body(stories))


def compare_body(stories: Sequence[Story]) -> str:
    """The part of a comparison that changes while runs go on."""
    return part("body", _compare_body(stories))


def _compare_body(stories: Sequence[Story]) -> dict[str, object]:
    return {"heading": "", "found": comparison_sections(stories)}


# Papers


def papers_page() -> str:
    """Which tables there are."""
    return page("papers", "Papers", {"papers": tables_by_paper()}, here="/papers")


def table_page(name: str, papers: Path, sights: Iterable[Sight]) -> str:
    """One table of a paper."""
    found = declared(name).table
    values = {
        "name": name,
        "paper": found.paper,
        "has_results": (papers / found.paper / "results").is_dir(),
        "parts": parts_of_table(name, papers, sights),
    }
    return page("paper_table", found.title, values, here="/papers")


# The latent explorer


@dataclass(frozen=True)
class Choice:
    """A list to choose from: what is sent, and the words for it."""

    name: str
    label: str
    options: Mapping[str, str]


def explore_page(sight: Sight, explorer: Explorer) -> str:
    """Controls; the images come one by one as they are asked for."""
    entry = sight.glance.entry
    values = {
        "key": entry.key,
        "name": entry.name,
        "explorer": explorer,
        "size": explorer.dimensions(explorer.settled(View())),
        "choices": list(_choices(explorer)),
        "reach": REACH,
    }
    return page("explore", f"Latent space of {entry.name}", values)


def _choices(explorer: Explorer) -> Iterator[Choice]:
    generator = explorer.generator
    ways = {name: generator.method.pathways[name] for name in generator.pathways}
    groups = {group: group for group in generator.groups}
    yield Choice("group", "Group", groups)
    if len(groups) > 1 and any(way.uses_prior for way in ways.values()):
        yield Choice("prior", "Prior of", {"": "the same group"} | groups)
    yield Choice("pathway", "Pathway", {name: f"{name}: {way.summary}" for name, way in ways.items()})
    if any(way.labelled for way in ways.values()):
        yield Choice("label", "Class", {name: name for name in generator.classes})
