"""Links of the pages, as a host shows them from the repository: what they lead to exists, to the heading."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from documentation import PAGES, ROOT, tokens

LINKING = [*PAGES, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "plugin" / "README.md"]
HOME = ROOT / "docs" / "index.md"
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(#[^)\s]*)?\)")


@cache
def anchors(page: Path) -> frozenset[str]:
    """What can stand behind a # of a page: its headings in small letters, with hyphens for blanks."""
    found, after = list[str](), False
    for token in tokens(page):
        if after:
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", token.content)
            found.append(re.sub(r"[^\w\- ]", "", words).lower().replace(" ", "-"))
        after = token.type == "heading_open"
    return frozenset(found)


def dead_links(page: Path, text: str) -> list[str]:
    """Targets of a text on a page that are not there."""
    dead = []
    for path, anchor in LINK.findall(text):
        target = (page.parent / path).resolve() if path else page
        known = not anchor or (target.suffix == ".md" and target.is_file() and anchor[1:] in anchors(target))
        if not (target.exists() and known):
            dead.append(path + anchor)
    return dead


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text(encoding="utf-8")) == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "[a](studio.md) [b](studoi.md) [c](evaluation.md#the-verdict) [d](evaluation.md#the-verdikt) [e](#questions)"
    assert dead_links(HOME, text) == ["studoi.md", "evaluation.md#the-verdikt"]


def test_home_answers_ten_questions_in_few_words_with_a_link_each() -> None:
    section = HOME.read_text(encoding="utf-8").partition("## Questions")[2].partition("\n\nWords ")[0]
    rows = re.findall(r"^\| (.+\?) \| (.+) \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) == 10
    assert all(LINK.search(read) for _, _, read in rows)
    assert len(re.findall(r"[\w`'-]*\w[\w`'-]*", re.sub(r"\]\([^)]*\)", "]", section))) <= 200
    assert "docs/index.md#questions" in (ROOT / "README.md").read_text(encoding="utf-8")
