"""The studio's pages as HTML: what a run says is escaped, numbers and charts are those of the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template

import fedloom
from fedloom.reports.charts import ARROW_HEAD, number
from fedloom.reports.one_run import run_heading, run_sections
from fedloom.reports.parts import Section, Story, method_of, text
from fedloom.reports.several_runs import comparison_sections
from fedloom.studio.explorer import REACH, Explorer, View
from fedloom.studio.glance import Glance
from fedloom.studio.papers import declared, list_of_tables, parts_of_table
from fedloom.studio.watch import Sight

EXPLORER = Template((Path(__file__).parent / "explorer.html").read_text(encoding="utf-8"))
MARKS = {"running": "▶", "finished": "✓", "diverged": "✕", "silent": "…", "unreadable": "!"}
MOST_COMPARED = 8
PLACES = {"/": "Runs", "/papers": "Papers"}
# Rounds and state stand above the part that is renewed, and records are not loaded.
NO_CARDS = ("rounds", "state", "training records")
COLUMNS = ("run", "method", "data", "rounds", "best metrics", "privacy", "state")


def page(title: str, body: str, *, here: str = "", scripts: Sequence[str] = (), attributes: str = "") -> str:
    """A whole document; nothing of it is inline but structure."""
    current = {here: ' aria-current="page"'}
    links = "".join(f'<a href="{address}"{current.get(address, "")}>{name}</a>' for address, name in PLACES.items())
    modules = "".join(f'<script type="module" src="/static/{name}"></script>' for name in scripts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)} · fedloom studio</title>"
        '<link rel="icon" href="/static/icon.svg" type="image/svg+xml">'
        '<link rel="stylesheet" href="/static/page.css"><link rel="stylesheet" href="/static/studio.css">'
        f'<script src="/static/page.js" defer></script>{modules}</head><body>{ARROW_HEAD}'
        '<a class="skip" href="#content">Skip to the content</a>'
        '<div class="bar"><a class="brand" href="/">fedloom <b>studio</b></a>'
        f'<nav aria-label="Studio">{links}</nav></div>'
        f'<main id="content" tabindex="-1"{attributes}>{body}</main><p id="news" role="status" class="unseen"></p>'
        f"<footer>fedloom {text(fedloom.__version__)}. The studio only reads.</footer></body></html>\n"
    )


def error_page(sentence: str) -> str:
    """One sentence, and the way back."""
    return page("Not shown", f'<h1>Not shown</h1><p>{text(sentence)}</p><p><a href="/">All runs</a></p>')


# The runs at a glance


def runs_page(folder: str, sights: Mapping[str, Sight]) -> str:
    """A line for each run, the newest first."""
    order = sorted(sights.values(), key=lambda sight: -sight.glance.changed)
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("", *COLUMNS))
    rows = "".join(run_row(sight) for sight in order)
    body = (
        f'<h1>Runs</h1><p class="sub">in the folder {text(folder)}</p>'
        f'<form action="/compare" id="runs"><div class="tools">'
        '<label>Show only <input type="search" id="filter" size="26" placeholder="name, method, data, state"></label>'
        f'<button data-most="{MOST_COMPARED}">Compare chosen runs</button></div>'
        f'<div class="whole"><table class="runs"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        "</form>"
        f'<p id="none"{" hidden" if rows else ""}>No runs yet. One that is started with '
        f"<code>fedloom run demo --out {text(folder)}/first</code> appears here by itself.</p>"
    )
    return page("Runs", body, here="/", scripts=("runs.js",))


def run_row(sight: Sight) -> str:
    """A run's line."""
    glance, key = sight.glance, sight.glance.entry.key
    link = f'<a href="/runs/{key}">{text(glance.entry.name)}</a>'
    head = f'<tr id="run-{key}" data-name="{text(glance.entry.name)}" data-state="{text(sight.state)}">'
    if glance.problem:
        return (
            f'{head}<td></td><td data-label="run">{text(glance.entry.name)}</td>'
            f'<td colspan="5">{text(glance.problem)}</td>'
            f'<td data-label="state">{state_mark(sight.state)}</td></tr>'
        )
    best = "".join(
        f"<li>{text(one.metric)} <b>{number(one.value)}</b> <small>round {one.round}</small></li>"
        for one in glance.best
    )
    cells = (
        f"{link}<small>{text(glance.title)}, seed {text(glance.seed)}</small>",
        text(glance.method),
        text(glance.data),
        progress(glance),
        f"<ul>{best}</ul>" if best else "none yet",
        text(glance.privacy),
        state_mark(sight.state),
    )
    choose = f'<input type="checkbox" name="run" value="{key}" aria-label="Compare {text(glance.entry.name)}">'
    named = zip(COLUMNS, cells, strict=True)
    return (
        f'{head}<td class="choose">{choose}</td>'
        + "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in named)
        + "</tr>"
    )


def progress(glance: Glance) -> str:
    """How far a run is, and how long it may take yet."""
    left = glance.seconds_left
    wait = f"<small>about {_clock(left)} left</small>" if left and not glance.ended else ""
    done, planned = glance.rounds_done, glance.rounds_planned
    return (
        f'<span class="count">{done} of {planned}</span>'
        f'<progress max="{planned}" value="{done}" aria-label="Rounds done">{done}</progress>{wait}'
    )


def state_mark(state: str) -> str:
    """A state by its sign and its word, so that colour is not needed."""
    mark = f'<span class="{text(state)}" aria-hidden="true">{MARKS.get(state, "?")}</span>'
    return f'<span class="state">{mark} {text(state)}</span>'


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(min(seconds, 1e8)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# One run, and several compared


def run_page(sight: Sight, story: Story) -> str:
    """Everything about a run; it is renewed while the run goes on."""
    key, glance = sight.glance.entry.key, sight.glance
    body = (
        f'<h1>{text(glance.entry.name)}</h1><p class="sub">{text(method_of(story.facts))}, seed {text(glance.seed)}</p>'
        f'<div class="live"><div id="state">{state_mark(sight.state)}</div><div id="progress">{progress(glance)}</div>'
        f'<a class="button" href="/runs/{key}/explore">Explore the latent space</a></div>'
        f'<div id="body">{run_body(story)}</div>'
    )
    return page(glance.entry.name, body, scripts=("live.js",), attributes=_live(f"/runs/{key}/body", [sight]))


def run_body(story: Story) -> str:
    """The part of a run's page that changes as it goes on."""
    sections = run_sections(story, "", with_samples=True)
    return f'<section id="heading">{run_heading(story, NO_CARDS)}{_contents(sections)}</section>{_html(sections)}'


def compare_page(sights: Sequence[Sight], stories: Sequence[Story]) -> str:
    """Runs side by side."""
    keys = [sight.glance.entry.key for sight in sights]
    names = ", ".join(
        f'<a href="/runs/{key}">{text(story.facts.label)}</a>' for key, story in zip(keys, stories, strict=True)
    )
    body = (
        f'<h1>{len(stories)} runs compared</h1><p class="sub">{names}</p><div id="body">{compare_body(stories)}</div>'
    )
    address = "/compare/body?" + "&amp;".join(f"run={key}" for key in keys)
    attributes = _live(address, sights)
    return page("Runs compared", body, scripts=("live.js",), attributes=attributes)


def compare_body(stories: Sequence[Story]) -> str:
    """The part of a comparison that changes while runs go on."""
    sections = comparison_sections(stories)
    return f'<section id="heading">{_contents(sections)}</section>{_html(sections)}'


def _live(address: str, sights: Sequence[Sight]) -> str:
    """What the page shows at first, so that whatever happens before it listens is news to it."""
    keys = " ".join(sight.glance.entry.key for sight in sights)
    stamps = " ".join(sight.glance.stamp for sight in sights)
    states = text(" ".join(sight.state for sight in sights))
    return f' data-live="{address}" data-keys="{keys}" data-stamps="{stamps}" data-states="{states}"'


def _contents(sections: Sequence[Section]) -> str:
    links = "".join(f'<a href="#{section.anchor}">{text(section.title)}</a>' for section in sections)
    return f'<nav aria-label="Sections">{links}</nav>'


def _html(sections: Iterable[Section]) -> str:
    return "".join(section.html() for section in sections)


# Papers


def papers_page() -> str:
    """Which tables there are."""
    body = f"<h1>Papers</h1><p>What was published, and what was obtained here.</p>{list_of_tables()}"
    return page("Papers", body, here="/papers")


def table_page(name: str, papers: Path, sights: Iterable[Sight]) -> str:
    """One table of a paper."""
    found = declared(name).table
    hidden = " hidden" if (papers / found.paper / "results").is_dir() else ""
    body = (
        f'<h1>{text(found.title)}</h1><p class="sub">{text(found.paper)}, <a href="/papers">all tables</a></p>'
        f"<p{hidden}>There are no results yet: <code>fedloom reproduce {text(name)}</code> "
        f"obtains them. Published values stand here already.</p>{parts_of_table(name, papers, sights)}"
    )
    return page(found.title, body, here="/papers")


# The latent explorer


def explore_page(sight: Sight, explorer: Explorer) -> str:
    """Controls; the images come one by one as they are asked for."""
    glance, generator, start = sight.glance, explorer.generator, explorer.settled(View())
    ways = generator.method.pathways
    labelled = any(ways[name].labelled for name in generator.pathways)
    swappable = len(generator.groups) > 1 and any(ways[name].uses_prior for name in generator.pathways)
    choices = [
        _choice("group", "Group", generator.groups),
        _choice("prior", "Prior of", ("", *generator.groups), {"": "the same group"}) if swappable else "",
        _choice(
            "pathway", "Pathway", generator.pathways, {way: f"{way}: {ways[way].summary}" for way in generator.pathways}
        ),
        _choice("label", "Class", generator.classes) if labelled else "",
    ]
    key, size = glance.entry.key, explorer.dimensions(start)
    body = EXPLORER.substitute(
        key=key,
        name=text(glance.entry.name),
        facts=f"round {explorer.round}, {size} dimension{'' if size == 1 else 's'}",
        choices="".join(choices),
    )
    attributes = f' data-run="{key}" data-round="{explorer.round}" data-reach="{REACH:g}"'
    return page(f"Latent space of {glance.entry.name}", body, scripts=("explore.js",), attributes=attributes)


NO_WORDS: Mapping[str, str] = {}


def _choice(name: str, label: str, values: Iterable[str], words: Mapping[str, str] = NO_WORDS) -> str:
    options = "".join(f'<option value="{text(value)}">{text(words.get(value, value))}</option>' for value in values)
    return f'<label>{label} <select name="{name}">{options}</select></label>'
