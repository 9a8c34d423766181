"""The one palette: legible by day and by night, and the same wherever it cannot be read from the style sheet."""

from __future__ import annotations

import re

import pytest

from fedloom.certificate import pdf
from fedloom.templating import MARK, style_of
from html_pages import Page

COLOURS = {
    name: {"day": day, "night": night}
    for name, day, night in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style_of())
}
PAIRS = [
    *((ink, ground) for ink in ("ink", "quiet", "accent", "good", "careful", "bad") for ground in ("paper", "panel")),
    *(("warn-ink", "warn"), ("ink", "best"), ("on-accent", "accent")),
]


def luminance(colour: str) -> float:
    """As WCAG 2.1 defines it."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["day", "night"])
@pytest.mark.parametrize(("ink", "ground"), PAIRS)
def test_letters_are_legible(ink: str, ground: str, scheme: str) -> None:
    """At the contrast that WCAG asks of text (AA)."""
    darker, lighter = sorted(luminance(COLOURS[name][scheme]) for name in (ink, ground))
    assert (lighter + 0.05) / (darker + 0.05) >= 4.5


def test_paper_that_is_printed_has_the_colours_of_the_day() -> None:
    for name, colour in {"ink": pdf.INK, "quiet": pdf.QUIET, "line": pdf.LINE, "panel": pdf.PANEL, **pdf.TONES}.items():
        assert colour == COLOURS[name]["day"]


def test_style_sheets_name_no_colour_that_is_not_there() -> None:
    sheets = style_of("reports/page.css", "certificate/page.css", "studio/static/studio.css")
    named, defined = set(re.findall(r"var\(--([\w-]+)", sheets)), set(re.findall(r"--([\w-]+):", style_of()))
    assert named <= defined


def test_the_mark_is_a_drawing_and_nothing_else() -> None:
    drawn = Page(str(style_of(MARK)).removeprefix(str(style_of())))
    assert {tag for tag, _ in drawn.elements} == {"svg", "rect", "g", "path"}
