"""The document: style and script are inlined, and nothing else is allowed."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from fedloom.reports.one_run import run_heading, run_sections
from fedloom.reports.parts import Section, Story, method_of, title_of
from fedloom.reports.several_runs import comparison_sections, verdicts
from fedloom.templating import render, style_of

ROOM = Path(__file__).parent


def page(stories: Sequence[Story], version: str, json_name: str) -> str:
    """The whole document."""
    several = len(stories) > 1
    style, script = style_of("reports/page.css"), Markup((ROOM / "page.js").read_text(encoding="utf-8"))
    values = {
        "title": f"{len(stories)} runs compared" if several else title_of(stories[0].facts),
        "labels": ", ".join(story.facts.label for story in stories),
        "heading": verdicts(stories) if several else run_heading(stories[0]),
        "found": comparison_sections(stories) if several else run_sections(stories[0], "", with_samples=True),
        "runs": [_collapsed(f"run{i}", story) for i, story in enumerate(stories, start=1)] if several else [],
        "with_records": any(story.facts.with_records for story in stories),
        "style": style,
        "script": script,
        "hashes": {"style": _hash(style), "script": _hash(script)},
        "version": version,
        "json_name": json_name,
    }
    return f"{render('reports/templates/page.html', values)}\n"


def _collapsed(anchor: str, story: Story) -> Section:
    """One of several runs, below what compares them."""
    values = {
        "summary": f"{story.facts.label}: {method_of(story.facts)}",
        "heading": run_heading(story),
        "found": run_sections(story, f"{anchor}-", with_samples=False),
    }
    return Section(anchor, story.facts.label, render("reports/templates/collapsed.html", values))


def _hash(content: str) -> str:
    """As a security policy names what alone is let in."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
