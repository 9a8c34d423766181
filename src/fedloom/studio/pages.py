"""The studio's pages: what they say, in plain values for their templates; numbers and charts are the report's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

import fedloom
from fedloom.presets import about_preset
from fedloom.privacy.summary import NONE
from fedloom.release.formats import FORMATS
from fedloom.reports.one_run import run_heading, run_sections
from fedloom.reports.parts import Section, Story, method_of
from fedloom.reports.several_runs import comparison_sections, verdicts
from fedloom.reports.verdict import verdict_of
from fedloom.runs.folder import RunFolder
from fedloom.studio.explorer import REACH, Explorer, View
from fedloom.studio.handing_on import HandingOn
from fedloom.studio.papers import declared, parts_of_table, tables_by_paper
from fedloom.studio.run_summary import RunSummary
from fedloom.studio.tradeoff import tradeoffs
from fedloom.studio.watch import LiveRun
from fedloom.studio.workbench import Deed
from fedloom.templating import render

MOST_COMPARED = 8
# Rounds and state stand above the part that is renewed, and records are not loaded.
NO_CARDS = ("rounds", "state", "training records")


def part(name: str, values: Mapping[str, object]) -> Markup:
    """A part of a page, by the name of its template."""
    return render(f"studio/templates/{name}.html", values)


def page(name: str, title: str, values: Mapping[str, object], here: str = "") -> str:
    """A whole document by the name of its template; ``here`` is where its place in the navigation leads."""
    return f"{part(name, {'title': title, 'here': here, 'version': fedloom.__version__, 'works': False, **values})}\n"


def error_page(sentence: str) -> str:
    """One sentence, and the way back."""
    return page("error", "Not shown", {"sentence": sentence})


# The runs at a summary


def runs_page(folder: str, live_runs: Mapping[str, LiveRun], works: bool = False) -> str:
    """A line for each run, the newest first."""
    order = sorted(live_runs.values(), key=lambda live_run: -live_run.summary.changed)
    values = {"folder": folder, "live_runs": order, "most_compared": MOST_COMPARED, "works": works}
    return page("runs", "Runs", values, here="/")


def begin_page(folder: str, presets: Iterable[str]) -> str:
    """What a run may begin from."""
    found = [(name, about_preset(name)) for name in presets]
    return page("begin", "Begin a run", {"folder": folder, "presets": found, "works": True})


def confirm_page(deed: Deed, asked: Mapping[str, str], seal: str) -> str:
    """A deed before it is done."""
    values = {"sentence": deed.sentence, "command": deed.command, "asked": list(asked.items()), "seal": seal}
    return page("confirm", deed.sentence, values | {"works": True})


def run_row(live_run: LiveRun) -> str:
    """A run's line."""
    return part("row", {"summary": live_run.summary, "state": live_run.state})


def progress(summary: RunSummary) -> str:
    """How far a run is, and how long it may take yet."""
    return part("progress", {"summary": summary})


def state_mark(state: str) -> str:
    """A state by its sign and its word."""
    return part("state", {"state": state})


# One run, and several compared


def run_page(live_run: LiveRun, story: Story, works: bool = False) -> str:
    """Everything about a run; it is renewed while the run goes on."""
    summary = live_run.summary
    values = {
        "summary": summary,
        "state": live_run.state,
        "method": method_of(story.facts),
        "address": f"/runs/{summary.entry.key}/body",
        "live_runs": [live_run],
        "works": works,
        "is_private": summary.privacy != NONE,
    }
    return page("run", summary.entry.name, values | _run_body(story))


def run_body(story: Story) -> str:
    """The part of a run's page that changes as it goes on."""
    return part("body", _run_body(story))


def release_page(live_run: LiveRun, found: HandingOn, works: bool) -> str:
    """What can be handed on, and what was."""
    entry = live_run.summary.entry
    values = {
        "key": entry.key,
        "name": entry.name,
        "verdict": live_run.summary.verdict or verdict_of(RunFolder.open(entry.path)),
        "found": found,
        "formats": list(FORMATS),
        "works": works,
    }
    return page("release", f"Hand on {entry.name}", values)


def _run_body(story: Story) -> dict[str, object]:
    return {"heading": run_heading(story, NO_CARDS), "found": run_sections(story, "", with_samples=True)}


def compare_page(live_runs: Sequence[LiveRun], stories: Sequence[Story]) -> str:
    """Runs side by side."""
    keys = [live_run.summary.entry.key for live_run in live_runs]
    values = {
        "names": {key: story.facts.label for key, story in zip(keys, stories, strict=True)},
        "address": "/compare/body?" + "&".join(f"run={key}" for key in keys),
        "live_runs": live_runs,
    }
    return page("compare", "Runs compared", values | _compare_body(live_runs, stories))


def compare_body(live_runs: Sequence[LiveRun], stories: Sequence[Story]) -> str:
    """The part of a comparison that changes while runs go on."""
    return part("body", _compare_body(live_runs, stories))


def _compare_body(live_runs: Sequence[LiveRun], stories: Sequence[Story]) -> dict[str, object]:
    found = comparison_sections(stories)
    if bought := tradeoffs(live_run.summary for live_run in live_runs):
        found.append(Section("epsilon", "Quality over epsilon", part("tradeoffs", {"found": bought})))
    return {"heading": verdicts(stories), "found": found}


def privacy_page(folder: str, summaries: Iterable[RunSummary]) -> str:
    """Quality over epsilon, for all runs that tell of it."""
    return page("privacy", "Privacy and quality", {"folder": folder, "found": tradeoffs(summaries)}, here="/privacy")


# Papers


def papers_page() -> str:
    """Which tables there are."""
    return page("papers", "Papers", {"papers": tables_by_paper()}, here="/papers")


def table_page(name: str, papers: Path, live_runs: Iterable[LiveRun]) -> str:
    """One table of a paper."""
    found = declared(name).table
    values = {
        "name": name,
        "paper": found.paper,
        "has_results": (papers / found.paper / "results").is_dir(),
        "parts": parts_of_table(name, papers, live_runs),
    }
    return page("paper_table", found.title, values, here="/papers")


# The latent explorer


@dataclass(frozen=True)
class Choice:
    """A list to choose from: what is sent, and the words for it."""

    name: str
    label: str
    options: Mapping[str, str]


def explore_page(live_run: LiveRun, explorer: Explorer) -> str:
    """Controls; the images come one by one as they are asked for."""
    entry = live_run.summary.entry
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
