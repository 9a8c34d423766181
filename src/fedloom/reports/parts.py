"""The parts that sections are put together from; every text of a run goes through :func:`text`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fedloom.reports.facts import RunFacts
from fedloom.reports.findings import Finding
from fedloom.reports.logs import History
from fedloom.reports.panels import Panel
from fedloom.reports.pictures import Films, Samples
from fedloom.runs.metrics import TRAINING, is_metric


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


def title_of(facts: RunFacts) -> str:
    """What a page about one run is called."""
    return f"{facts.name}: {method_of(facts)}"


def method_of(facts: RunFacts) -> str:
    """The method with its options."""
    options = ", ".join(f"{name}={json.dumps(value, default=str)}" for name, value in facts.options.items())
    return f"{facts.method} ({options})" if options else facts.method


def figure_grid(parts: Sequence[str], kind: str = "") -> str:
    """Figures side by side as the width allows; ``kind`` is a style that says how wide each is."""
    inside = "".join(f"<figure>{part}</figure>" for part in parts)
    return f'<div class="figures {kind}">{inside}</div>' if parts else ""


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: tuple[int, ...] = (), key: int = -1) -> str:
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


def finding_list(found: Sequence[Finding]) -> str:
    """Warnings, or that there are none."""
    if not found:
        return '<p class="fine">Nothing in the numbers of this run calls for a warning.</p>'
    items = "".join(f'<li data-kind="{text(one.kind)}">{text(one.sentence)}</li>' for one in found)
    return f'<ul class="findings">{items}</ul>'


def losses_first(metrics: History) -> list[tuple[str, dict[int, float | None]]]:
    """Loss terms, then metrics, then costs such as seconds."""
    return sorted(metrics.items(), key=lambda item: (not item[0].startswith(TRAINING), not is_metric(item[0])))


def points_of(key: str, history: Mapping[int, float | None]) -> tuple[tuple[int, float | None], ...]:
    """A curve's points, bytes as megabytes."""
    scale = 1e-6 if key in ("bytes", "bytes_down") else 1.0
    return tuple((round_number, None if value is None else scale * value) for round_number, value in history.items())


def curve_name(family: str) -> str:
    """A curve's name with its unit, where the key does not say it."""
    known = {
        "seconds": "seconds a round",
        "steps": "steps a round",
        "bytes": "MB that left in a round",
        "bytes_down": "MB that silos were sent in a round",
    }
    return known.get(family, family.removeprefix(TRAINING))


def sample_films(stories: Sequence[Story]) -> str:
    """The grids of all runs, moved by one slider: group after group, and within a group run beside run."""
    runs = {story.facts.label: story.samples for story in stories}
    rounds = sorted({number for samples in runs.values() for film in samples.films.values() for number in film})
    broken = [file for samples in runs.values() for file in samples.broken]
    note = f"<p>Not readable as a picture: {text(', '.join(broken[:5]))}.</p>" if broken else ""
    if not rounds:
        return f"<p>There are no sample grids: records are no images, or no round was evaluated yet.</p>{note}"
    if len(stories) == 1:
        films = figure_grid([_film(group, film) for group, film in stories[0].samples.films.items()])
    else:
        groups = dict.fromkeys(group for samples in runs.values() for group in samples.films)
        films = "".join(_film_row(group, {label: samples.films for label, samples in runs.items()}) for group in groups)
    if len(rounds) == 1:
        return note + films
    slider = (
        '<label for="slider">round</label><input id="slider" type="range" min="0" step="1" '
        f'max="{len(rounds) - 1}" value="{len(rounds) - 1}" data-rounds="{text(json.dumps(rounds))}">'
        f"<output>round {rounds[-1]}</output>"
    )
    return f'{note}<div class="player"><div class="control">{slider}</div>{films}</div>'


def _film_row(group: str, runs: Mapping[str, Films]) -> str:
    figures = [_film(label, films[group]) for label, films in runs.items() if group in films]
    return f"<h3>{text(group)}</h3>{figure_grid(figures, 'beside')}"


def _film(label: str, film: Mapping[int, str]) -> str:
    newest = max(film)
    frames = "".join(
        f'<img data-round="{round_number}" src="{picture}" alt="Samples of {text(label)} after round {round_number}"'
        f"{'' if round_number == newest else ' hidden'}>"
        for round_number, picture in film.items()
    )
    return f'<figcaption><b>{text(label)}</b>, <span class="shown">round {newest}</span></figcaption>{frames}'
