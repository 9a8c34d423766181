"""The document: style and script are inlined, and nothing else is allowed."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from fedloom.reports.one_run import run_heading, run_sections
from fedloom.reports.parts import Section, Story, method_of, title_of
from fedloom.reports.several_runs import comparison_sections
from fedloom.templating import render


@dataclass(frozen=True)
class Inlined:
    """A style or a script, and the hash by which alone a browser lets it in."""

    content: Markup

    @classmethod
    def read(cls, name: str) -> Inlined:
        """A file of this room."""
        return cls(Markup(Path(__file__).with_name(name).read_text(encoding="utf-8")))

    @property
    def hash(self) -> str:
        """As a security policy names it."""
        return f"sha256-{base64.b64encode(hashlib.sha256(self.content.encode()).digest()).decode()}"


@dataclass(frozen=True)
class Collapsed:
    """One of several runs, below what compares them."""

    anchor: str
    label: str
    summary: str
    heading: Markup
    sections: Sequence[Section]

    @classmethod
    def of(cls, position: int, story: Story) -> Collapsed:
        """The run at a position, which is in its anchors."""
        anchor, label = f"run{position}", story.facts.label
        sections = run_sections(story, f"{anchor}-", with_samples=False)
        return cls(anchor, label, f"{label}: {method_of(story.facts)}", run_heading(story), sections)


def page(stories: Sequence[Story], version: str, json_name: str) -> str:
    """The whole document."""
    several = len(stories) > 1
    sections = comparison_sections(stories) if several else run_sections(stories[0], "", with_samples=True)
    runs = [Collapsed.of(position, story) for position, story in enumerate(stories, start=1)] if several else []
    values = {
        "title": f"{len(stories)} runs compared" if several else title_of(stories[0].facts),
        "labels": [story.facts.label for story in stories],
        "heading": Markup() if several else run_heading(stories[0]),
        "found": sections,
        "runs": runs,
        "style": Inlined.read("page.css"),
        "script": Inlined.read("page.js"),
        "version": version,
        "json_name": json_name,
    }
    return f"{render('reports/templates/page.html', values)}\n"
