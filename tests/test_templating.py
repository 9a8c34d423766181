"""Markup lies in templates alone, and no value becomes markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

import fedloom
from fedloom.templating import plain, render

SOURCE = Path(fedloom.__file__).parent
TEMPLATES = sorted(path for path in SOURCE.rglob("templates/**/*") if path.is_file())
TAG = re.compile(r"</[a-z]|<[a-z][a-z0-9]* [a-z-]+=")
ATTACK = "<script>alert(1)</script> | \"'\n# title"


def test_no_tag_stands_in_python() -> None:
    assert [bool(TAG.search(text)) for text in ('<a href="/">', "</p>", "runs/<name> x=1")] == [True, True, False]
    assert [path for path in SOURCE.rglob("*.py") if TAG.search(path.read_text(encoding="utf-8"))] == []


def test_no_template_lets_a_value_through_unescaped() -> None:
    assert {path.parent.parent.name for path in TEMPLATES} >= {"reports", "studio", "release"}
    unescaped = re.compile(r"\|\s*safe\b|autoescape")
    assert [path for path in TEMPLATES if unescaped.search(path.read_text(encoding="utf-8"))] == []


def test_a_value_that_is_missing_is_a_fault() -> None:
    with pytest.raises(UndefinedError, match="'sentence' is undefined"):
        render("studio/templates/error.html", {"title": "", "here": "", "version": ""})


def test_a_value_is_text_and_what_a_template_drew_is_markup() -> None:
    assert f"<pre>{Markup.escape(ATTACK)}</pre>" == render(
        "reports/templates/sections/configuration.html", {"toml": ATTACK}
    )
    drawn = render("reports/templates/charts/nothing.html", {})
    assert render("reports/templates/sections/configuration.html", {"toml": drawn}) == f"<pre>{drawn}</pre>"


def test_a_value_stays_on_its_line_of_markdown() -> None:
    told = "&lt;script>alert(1)&lt;/script> \\| \"' # title"
    assert plain(ATTACK) == told
    assert plain(Markup("| a |")) == "| a |"
