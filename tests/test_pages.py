"""How long pages are, and how they begin: what the page on style asks for."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from documentation import PAGES, ROOT
from support import script

NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
EXPLAINED = re.findall(
    r": (\S+\.md)$", NAVIGATION.partition("- Explanation:")[2].partition("- Reference:")[0], re.MULTILINE
)
EXPLANATIONS = [ROOT / "docs" / page for page in EXPLAINED if page != "glossary.md"]
HOW_TOS = sorted((ROOT / "docs" / "how-to").glob("*.md"))


@pytest.fixture(scope="module")
def readability() -> ModuleType:
    """What measures pages."""
    return script("readability")


@pytest.mark.parametrize("page", EXPLANATIONS, ids=lambda page: page.stem)
def test_an_explanation_opens_with_a_few_sentences_and_a_picture(page: Path, readability: ModuleType) -> None:
    text = page.read_text(encoding="utf-8")
    assert readability.measured(text).words <= 1200
    _, opening, then = text.split("\n\n", 2)
    assert 2 <= len(re.findall(r"[.?!](?=\s|$)", opening)) <= 5
    assert then.startswith("![")


@pytest.mark.parametrize("page", HOW_TOS, ids=lambda page: page.stem)
def test_a_how_to_has_at_most_400_words(page: Path, readability: ModuleType) -> None:
    assert readability.measured(page.read_text(encoding="utf-8")).words <= 400


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "appendix.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_table_has_at_most_six_columns(page: Path, readability: ModuleType) -> None:
    assert readability.measured(page.read_text(encoding="utf-8")).widest <= 6


def test_the_measures_of_a_small_page(readability: ModuleType) -> None:
    found = readability.measured("# A page\n\nOne cat sat.\n\n| a | b |\n|---|---|\n| c | d |\n")
    assert (found.words, found.longest, found.widest) == (17, 12, 2)
    assert readability.reading_ease("One cat sat.") == pytest.approx(206.835 - 1.015 * 3 - 84.6)
