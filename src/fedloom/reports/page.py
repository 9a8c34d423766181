"""The document: plain functions that return HTML, style and script inlined and nothing else allowed."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from fedloom.reports.charts import ARROW_HEAD
from fedloom.reports.one_run import run_heading, run_sections
from fedloom.reports.parts import Story, method_of, text, title_of
from fedloom.reports.several_runs import comparison_sections

ROOM = Path(__file__).parent


def page(stories: Sequence[Story], version: str, json_name: str) -> str:
    """The whole document."""
    if len(stories) == 1:
        title = title_of(stories[0].facts)
        sections = run_sections(stories[0], "", with_samples=True)
        heading = run_heading(stories[0])
        runs = ""
    else:
        title = f"{len(stories)} runs compared"
        sections = comparison_sections(stories)
        heading = f'<p class="sub">{text(", ".join(story.facts.label for story in stories))}</p>'
        runs = "".join(_collapsed(position, story) for position, story in enumerate(stories, start=1))
    targets = [(section.anchor, section.title) for section in sections]
    if runs:
        targets += [(f"run{position}", story.facts.label) for position, story in enumerate(stories, start=1)]
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


def _collapsed(position: int, story: Story) -> str:
    sections = run_sections(story, f"run{position}-", with_samples=False)
    body = run_heading(story) + "".join(section.html() for section in sections)
    summary = f"{story.facts.label}: {method_of(story.facts)}"
    return f'<details class="run" id="run{position}"><summary>{text(summary)}</summary>{body}</details>'
