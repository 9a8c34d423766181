"""The page: plain functions that return HTML; every text of a run goes through :func:`text`."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.reports.charts import ARROW_HEAD, Copy, Link, Series, bars, line_chart, number, sharing_diagram
from fedloom.reports.facts import RunFacts, SiloFacts
from fedloom.reports.findings import Finding
from fedloom.reports.metrics import TRAINING, History, best, is_metric, last, sample_count, split_key, uncounted
from fedloom.reports.panels import Panel
from fedloom.reports.pictures import Films, Samples

ROOM = Path(__file__).parent
MOST_SILOS = 200  # rows of a table; the JSON file has them all
MOST_LINES = 24  # in one chart
MOST_BOXES = 12  # on a side of the sharing diagram
BROAD_PANELS = {"reconstructions", "interpolations", "nearest-neighbours"}
SMALL_PANELS = {"prior-swap", "pathways"}


@dataclass(frozen=True)
class Story:
    """All that a page tells about one run."""

    facts: RunFacts
    findings: Sequence[Finding]
    samples: Samples
    panels: Mapping[str, Panel]


@dataclass(frozen=True)
class Section:
    """A heading that the navigation leads to, and what stands under it."""

    anchor: str
    title: str
    body: str

    def html(self) -> str:
        """The section."""
        return f'<section id="{self.anchor}"><h2>{text(self.title)}</h2>{self.body}</section>'


def text(value: Any) -> str:
    """Anything as text that cannot be markup."""
    return escape(str(value), quote=True)


def page(stories: Sequence[Story], version: str, json_name: str) -> str:
    """The whole document."""
    if len(stories) == 1:
        title = _title(stories[0].facts)
        sections = run_sections(stories[0], "", with_samples=True)
        heading = _run_heading(stories[0])
        runs = ""
    else:
        title = f"{len(stories)} runs compared"
        sections = comparison_sections(stories)
        heading = f'<p class="sub">{text(", ".join(story.facts.label for story in stories))}</p>'
        runs = "".join(_collapsed(number_, story) for number_, story in enumerate(stories, start=1))
    targets = [(section.anchor, section.title) for section in sections]
    if runs:
        targets += [(f"run{number_}", story.facts.label) for number_, story in enumerate(stories, start=1)]
    links = "".join(f'<a href="#{anchor}">{text(name)}</a>' for anchor, name in targets)
    style, script = (ROOM.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{style}</style></head><body>{ARROW_HEAD}"
        f'<header class="top"><h1>{text(title)}</h1>{heading}<nav aria-label="Sections">{links}</nav></header>'
        f"<main>{''.join(section.html() for section in sections)}{runs}</main>"
        f"<footer>Made by fedloom {text(version)}. All numbers of this page: {text(json_name)}.</footer>"
        f"<script>{script}</script></body></html>\n"
    )


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _title(facts: RunFacts) -> str:
    return f"{facts.name}: {_method(facts)}"


def _method(facts: RunFacts) -> str:
    options = ", ".join(f"{name}={json.dumps(value, default=str)}" for name, value in facts.options.items())
    return f"{facts.method} ({options})" if options else facts.method


def _collapsed(number_: int, story: Story) -> str:
    sections = run_sections(story, f"run{number_}-", with_samples=False)
    body = _run_heading(story) + "".join(section.html() for section in sections)
    summary = f"{story.facts.label}: {_method(story.facts)}"
    return f'<details class="run" id="run{number_}"><summary>{text(summary)}</summary>{body}</details>'


# One run


def run_sections(story: Story, prefix: str, *, with_samples: bool) -> list[Section]:
    """Everything about one run, in the order in which people ask."""
    facts, found = story.facts, []

    def add(anchor: str, title: str, body: str) -> None:
        if body:
            found.append(Section(prefix + anchor, title, body))

    if with_samples:
        add("samples", "Samples, round by round", _samples([story], prefix))
    add("silos", "Who took part", _silos(facts))
    add("sharing", "Who shares what", _sharing(facts))
    add("metrics", "Metrics", _metrics_table(facts) + _curves(facts, training=False))
    add("training", "Training", _curves(facts, training=True))
    for name, panel in story.panels.items():
        add(name, panel.title, _panel(name, panel))
    add("egress", "What left each silo", _egress(facts))
    add("privacy", "Privacy", _privacy(facts))
    add("reproduce", "Reproduce", _reproduce(facts))
    add("environment", "Environment", _table(("", ""), [(text(k), text(v)) for k, v in facts.environment.items()]))
    add("configuration", "Configuration", f"<pre>{text(tomli_w.dumps(facts.config))}</pre>")
    return found


def _run_heading(story: Story) -> str:
    facts = story.facts
    records = [silo.records for silo in facts.silos if silo.records is not None]
    cards = {
        "rounds": f"{facts.rounds_done} of {facts.rounds_planned}",
        "state": facts.status["state"],
        "silos": f"{len(facts.silos):,}" if facts.silos else "unknown",
        "groups": ", ".join(facts.groups[:4]) + (" …" if len(facts.groups) > 4 else "") or "unknown",
        "training records": f"{sum(records):,}" if records else "unknown",
        "left the silos": size(sum(silo.bytes for silo in facts.silos)),
        "privacy": facts.guarantee or "unknown",
    }
    boxes = "".join(f"<div><b>{text(value)}</b><span>{text(name)}</span></div>" for name, value in cards.items())
    return f'<div class="cards">{boxes}</div>{_findings(story.findings)}'


def _findings(found: Sequence[Finding]) -> str:
    if not found:
        return '<p class="fine">Nothing in the numbers of this run calls for a warning.</p>'
    items = "".join(f'<li data-kind="{text(one.kind)}">{text(one.sentence)}</li>' for one in found)
    return f'<ul class="findings">{items}</ul>'


def _silos(facts: RunFacts) -> str:
    data, participation = facts.config["data"], facts.config["participation"]
    share = f"In a round, {participation['rate']:.0%} of the silos take part ({participation['mode']})."
    if data["layout"] == "centralised":
        share = "All records lie in one silo, which takes part in every round."
    intro = f"Method {_method(facts)} on {data['source']}, partition {data['partition']}. {share}"
    rows = []
    for silo in facts.silos[:MOST_SILOS]:
        known = {name: silo.classes.get(name, 0) for name in _classes_beside(silo, facts)}
        rows.append(
            (
                text(silo.name),
                text(", ".join(silo.groups)),
                "unknown" if silo.records is None else f"{silo.records:,}",
                bars(f"Labels of {silo.name}", known) if known else "",
                f"{silo.rounds:,}",
            )
        )
    headers = ("silo", "groups", "records", "records of each class", "rounds taken part")
    unknown = any(silo.records is None for silo in facts.silos)
    why = "<p>Sizes and labels are missing because the records cannot be loaded again.</p>" if unknown else ""
    return f"<p>{text(intro)}</p>{why}{_table(headers, rows, right=(2, 4))}{_more(facts.silos)}"


def _classes_beside(silo: SiloFacts, facts: RunFacts) -> list[str]:
    """The classes that occur in silos of the same groups, so that their histograms can be compared."""
    there = {name for other in facts.silos if other.groups == silo.groups for name in other.classes}
    return [name for name in (*facts.classes, "unlabelled") if name in there]


def _more(silos: Sequence[SiloFacts]) -> str:
    hidden = len(silos) - MOST_SILOS
    return f'<p class="quiet">{hidden:,} more silos are in the JSON file.</p>' if hidden > 0 else ""


def _sharing(facts: RunFacts) -> str:
    if not facts.plan:
        return "<p>The sharing plan is not known: there is neither a checkpoint nor the data.</p>"
    parties: dict[tuple[str, ...], int] = {}
    for silo in facts.silos:
        parties[silo.groups or facts.groups] = parties.get(silo.groups or facts.groups, 0) + 1
    shown = dict(list(parties.items())[:MOST_BOXES]) or {(group,): 0 for group in facts.groups[:MOST_BOXES]}
    copies, links = _copies(facts, list(shown))
    stays = ", ".join(block for block, rule in facts.plan.items() if rule["scope"] == "silo" and not rule["up"])
    boxes = [
        (", ".join(groups), f"{count} silo{'' if count == 1 else 's'}" if count else "", stays)
        for groups, count in shown.items()
    ]
    rows = [
        (text(block), text(rule["scope"]), "yes" if rule["up"] else "never", text(rule["down"]))
        for block, rule in facts.plan.items()
    ]
    left_out = len(parties) - len(shown)
    more = f'<p class="quiet">{left_out} more kinds of silos are not drawn.</p>' if left_out > 0 else ""
    payloads = "".join(f"<li><b>{text(name)}</b>: {text(cost)}</li>" for name, cost in facts.payloads.items())
    return (
        "<p>Solid: one copy for everybody. Dashed: one for each group. Dotted: each silo's own. "
        "An arrow to the server means that it leaves the silo, one to the silos that a merged copy comes back.</p>"
        f"{sharing_diagram(boxes, copies, links)}{more}"
        f"{_table(('block', 'scope', 'leaves the silo', 'comes back'), rows)}"
        f"<p>Beside blocks there leaves:</p><ul>{payloads or '<li>nothing</li>'}</ul>"
    )


def _copies(facts: RunFacts, parties: Sequence[tuple[str, ...]]) -> tuple[list[Copy], list[Link]]:
    """The server's boxes, and the lines that lead to them."""
    copies: list[Copy] = []
    links: list[Link] = []
    for block, rule in facts.plan.items():
        owners = {
            "global": ["all silos"],
            "group": list(facts.groups),
            "silo": ["each silo's own"] if rule["up"] else [],
            "server": ["the server's own"],
        }[rule["scope"]]
        for owner in owners[: MOST_BOXES - len(copies)]:
            copies.append(Copy(block, owner, rule["scope"]))
            for index, groups in enumerate(parties):
                down = rule["down"] != "nothing"
                if (rule["scope"] != "group" or owner in groups) and (rule["up"] or down):
                    links.append(Link(index, len(copies) - 1, rule["up"], down))
    return copies, links


def _metrics_table(facts: RunFacts) -> str:
    rows = []
    for key in sorted(filter(is_metric, facts.metrics), key=lambda key: split_key(key)[0]):
        metric, whose = split_key(key)
        history = facts.metrics[key]
        rows.append((text(metric), text(whose or "all"), number(last(history)), str(max(history))))
    if not rows:
        return "<p>No metric was computed in this run; its loss terms are under Training.</p>"
    return _table(("metric", "of", "newest value", "in round"), rows, right=(2, 3), key=0)


def _curves(facts: RunFacts, *, training: bool) -> str:
    """A chart for each metric, or each loss term and cost, that has more than one value."""
    families: dict[str, list[Series]] = {}
    for key, history in _losses_first(facts.metrics):
        if is_metric(key) == training or len(history) < 2:
            continue
        metric, whose = split_key(uncounted(key))
        count = sample_count(key)
        name = f"{whose or 'all'} (n={count:,})" if count is not None else whose
        families.setdefault(metric, []).append(Series(name, _points(key, history)))
    charts = [
        (text(_named(family)), line_chart(f"{family} over rounds", series[:MOST_LINES], _named(family)))
        for family, series in families.items()
    ]
    return _figures([f"<figcaption><b>{caption}</b></figcaption>{chart}" for caption, chart in charts])


def _losses_first(metrics: History) -> list[tuple[str, dict[int, float | None]]]:
    """Loss terms, then metrics, then costs such as seconds."""
    return sorted(metrics.items(), key=lambda item: (not item[0].startswith(TRAINING), not is_metric(item[0])))


def _points(key: str, history: Mapping[int, float | None]) -> tuple[tuple[int, float | None], ...]:
    """A curve's points, bytes as megabytes."""
    scale = 1e-6 if key == "bytes" else 1.0
    return tuple((number_, None if value is None else scale * value) for number_, value in history.items())


def _named(family: str) -> str:
    """A curve's name with its unit, where the key does not say it."""
    known = {"seconds": "seconds a round", "steps": "steps a round", "bytes": "MB that left in a round"}
    return known.get(family, family.removeprefix(TRAINING))


def _samples(stories: Sequence[Story], prefix: str) -> str:
    """Grids of all runs, group by group, moved by one slider."""
    films = [(story.facts.label if len(stories) > 1 else "", story.samples) for story in stories]
    rounds = sorted({r for _, samples in films for film in samples.films.values() for r in film})
    broken = [file for _, samples in films for file in samples.broken]
    note = f"<p>Not readable as a picture: {text(', '.join(broken[:5]))}.</p>" if broken else ""
    if not rounds:
        return f"<p>This run left no sample grids: records are no images, or no round was evaluated yet.</p>{note}"
    slider = (
        f'<label for="{prefix}slider">round</label><input id="{prefix}slider" type="range" min="0" step="1" '
        f'max="{len(rounds) - 1}" value="{len(rounds) - 1}" data-rounds="{text(json.dumps(rounds))}">'
        f"<output>round {rounds[-1]}</output>"
    )
    groups = dict.fromkeys(group for _, samples in films for group in samples.films)
    rows = "".join(_film_row(group, [(label, samples.films) for label, samples in films]) for group in groups)
    if len(stories) == 1:
        rows = _figures([_film(group, film) for group, film in films[0][1].films.items()])
    if len(rounds) == 1:
        return note + rows
    return f'{note}<div class="player"><div class="control">{slider}</div>{rows}</div>'


def _film_row(group: str, films: Iterable[tuple[str, Films]]) -> str:
    figures = [_film(label, found[group]) for label, found in films if group in found]
    return f"<h3>{text(group)}</h3>{_figures(figures)}"


def _film(label: str, film: Mapping[int, str]) -> str:
    newest = max(film)
    frames = "".join(
        f'<img data-round="{number_}" src="{picture}" alt="Samples of {text(label)} after round {number_}"'
        f"{'' if number_ == newest else ' hidden'}>"
        for number_, picture in film.items()
    )
    return f'<figcaption><b>{text(label)}</b>, <span class="shown">round {newest}</span></figcaption>{frames}'


def _panel(name: str, panel: Panel) -> str:
    if panel.missing:
        return f"<p>{text(panel.intro)}</p><p><b>Not shown:</b> {text(panel.missing)}.</p>"
    kind = "broad" if name in BROAD_PANELS else "small" if name in SMALL_PANELS else ""
    rows = []
    for row, figures in itertools.groupby(panel.figures, key=lambda figure: figure.row):
        parts = [
            f"<figcaption>{text(figure.caption)}</figcaption>"
            + (figure.chart or f'<img src="{figure.picture}" alt="{text(panel.title)}: {text(figure.caption)}">')
            for figure in figures
        ]
        rows.append((f"<h3>{text(row)}</h3>" if row else "") + _figures(parts, kind))
    return f"<p>{text(panel.intro)}</p>{_latent_note(panel)}{''.join(rows)}"


def _latent_note(panel: Panel) -> str:
    if "active_dimensions" not in panel.numbers:
        return ""
    dimensions = panel.numbers["dimensions"]
    active = ", ".join(
        f"{count} of {dimensions} for {group}" for group, count in panel.numbers["active_dimensions"].items()
    )
    return f"<p>Latent dimensions that carry something about an image: {text(active)}.</p>"


def _egress(facts: RunFacts) -> str:
    rows = [
        (
            text(silo.name),
            f"{silo.rounds:,}",
            size(silo.bytes),
            size(silo.bytes / silo.rounds) if silo.rounds else "-",
            text(", ".join(silo.blocks)),
            text(", ".join(silo.payloads)),
        )
        for silo in facts.silos[:MOST_SILOS]
    ]
    if not any(silo.rounds for silo in facts.silos):
        return "<p>The egress log is empty: nothing has left a silo.</p>"
    headers = ("silo", "rounds", "bytes in all", "bytes a round", "blocks (block@owner)", "payloads")
    costs = "; ".join(f"{name}: {cost}" for name, cost in facts.payloads.items())
    meaning = f" What a payload is: {costs}." if costs else ""
    intro = f"<p>Every byte that crossed a silo's door, as the egress guard logged it.{text(meaning)}</p>"
    return intro + _table(headers, rows, right=(1, 2, 3)) + _more(facts.silos)


def _privacy(facts: RunFacts) -> str:
    if not facts.guarantee:
        return "<p>Unknown: there is neither a checkpoint nor the data to tell which mechanism was used.</p>"
    explained = {
        "no DP guarantee": "No mechanism bounds what the shared parameters reveal about a single record. That records "
        "stayed at their silos is no privacy guarantee by itself."
    }
    return f"<p><b>{text(facts.guarantee)}</b></p><p>{text(explained.get(facts.guarantee, ''))}</p>"


def _reproduce(facts: RunFacts) -> str:
    command = facts.environment.get("command", "")
    first = f"<p>It was first started with:</p><pre class='wrap'>{text(command)}</pre>" if command else ""
    seed = f"<p>Seed {facts.seed}; the same versions and the same number of threads give the same bits.</p>"
    return f"<pre class='wrap'>{text(facts.reproduce)}</pre>{seed}{first}"


# Several runs


def comparison_sections(stories: Sequence[Story]) -> list[Section]:
    """Metrics, samples and curves side by side; each run's own part follows."""
    warned = "".join(
        f"<h3>{text(story.facts.label)}: {text(_method(story.facts))}</h3>{_findings(story.findings)}"
        for story in stories
    )
    return [
        Section("metrics", "Metrics", _comparison_table(stories)),
        Section("samples", "Samples, round by round", _samples(stories, "")),
        Section("warnings", "Warnings", warned),
        Section("curves", "Curves", _overlaid(stories)),
    ]


def comparison(stories: Sequence[Story]) -> dict[str, dict[str, float | None]]:
    """The newest value of every metric that some run has: key -> run -> value."""
    keys = dict.fromkeys(key for story in stories for key in story.facts.metrics if is_metric(key))
    return {
        key: {story.facts.label: last(story.facts.metrics.get(key, {})) for story in stories}
        for key in sorted(keys, key=lambda key: split_key(key)[0])
    }


def _comparison_table(stories: Sequence[Story]) -> str:
    rows = []
    for key, values in comparison(stories).items():
        metric, whose = split_key(key)
        better = best(key, values.values())
        cells = [
            f'<td class="n{" best" if value is not None and value == better else ""}">'
            f"{'-' if value is None else number(value)}</td>"
            for value in values.values()
        ]
        rows.append(f'<tr><td class="key">{text(metric)}</td><td>{text(whose or "all")}</td>{"".join(cells)}</tr>')
    if not rows:
        return "<p>None of the runs has a metric yet.</p>"
    heads = "".join(f'<th class="n">{text(story.facts.label)}</th>' for story in stories)
    return (
        "<p>Newest values; a star marks the better one, where a metric has a better side.</p>"
        f'<div class="wide"><table><thead><tr><th>metric</th><th>of</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _overlaid(stories: Sequence[Story]) -> str:
    """A chart for each metric and group with a line for each run."""
    charts: dict[str, list[Series]] = {}
    for story in stories:
        for key, history in _losses_first(story.facts.metrics):
            if len(history) > 1:
                charts.setdefault(key, []).append(Series(story.facts.label, _points(key, history)))
    return _figures(
        [
            f"<figcaption><b>{text(_named(key))}</b></figcaption>"
            + line_chart(f"{key} over rounds", series[:MOST_LINES], _named(split_key(uncounted(key))[0]))
            for key, series in charts.items()
        ]
    )


# Parts


def _figures(parts: Sequence[str], kind: str = "") -> str:
    inside = "".join(f"<figure>{part}</figure>" for part in parts)
    return f'<div class="figures {kind}">{inside}</div>' if parts else ""


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: tuple[int, ...] = (), key: int = -1) -> str:
    """Cells are HTML; columns in ``right`` hold numbers, column ``key`` may break anywhere."""
    if not rows:
        return ""
    style = dict.fromkeys(right, ' class="n"') | {key: ' class="key"'}
    heads = "".join(f"<th{style.get(i, '')}>{text(header)}</th>" for i, header in enumerate(headers))
    body = "".join(
        "<tr>" + "".join(f"<td{style.get(i, '')}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows
    )
    head = f"<thead><tr>{heads}</tr></thead>" if any(headers) else ""
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
