"""The words of the pages: each thing has one, the glossary says which, and the drawings are those of their script."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from documentation import PAGES, ROOT
from support import script

GLOSSARY = ROOT / "docs" / "glossary.md"
TERMS = re.findall(r"^\| \*\*(.+?)\*\* \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
# What a newcomer would take for another thing, and the word that is meant.
INSTEAD = {
    r"clients?": "silo",
    r"data[- ]?points?": "record",
    r"global models?": "model",
    r"sub-?models?": "block",
    r"privacy budgets?": "budget",
    r"secure aggregation": "secure sum",
    r"(?:user|patient|person|client)-level": "subject",
    r"(?:sample|example)-level": "record",
    r"noise sharing|distributed DP": "shared noise",
    r"attestations?": "statement",
    r"hyper-?networks?": "model",
}
# Appendices and the laboratory book keep the papers' words; a changelog names what was.
READ = [page for page in PAGES if page.name != "appendix.md" and page.parent.name != "benchmarks"]
CODE = re.compile(r"^```.*?^```|^ {4,}[^\n]*$|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)|\"[^\"\n]*\"", re.DOTALL | re.MULTILINE)


def in_words(text: str) -> str:
    """A page without code, links' targets and quotations, which may say what they like."""
    return CODE.sub(" ", text)


def wrong_words(text: str) -> list[str]:
    """What is called by a word that the glossary does not have."""
    return [
        f"'{found[0]}': say '{word}'"
        for pattern, word in INSTEAD.items()
        for found in re.finditer(rf"\b(?:{pattern})\b", in_words(text), re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_calls_things_by_their_words(page: Path) -> None:
    assert wrong_words(page.read_text(encoding="utf-8")) == []


def test_a_wrong_word_is_found_in_text_and_not_in_code() -> None:
    assert wrong_words("The Clients train.") == ["'Clients': say 'silo'"]
    assert wrong_words('In `clients` and "clients".\n\n    clients = 3\n') == []


def test_the_glossary_is_short_and_every_word_of_it_is_used() -> None:
    assert 20 <= len(set(TERMS)) == len(TERMS) <= 40
    others = " ".join(in_words(page.read_text(encoding="utf-8")).lower() for page in READ if page != GLOSSARY)
    assert [term for term in TERMS if term.lower() not in others] == []
    assert set(INSTEAD.values()) <= set(TERMS)


@pytest.fixture(scope="module")
def drawings() -> ModuleType:
    """What makes the drawings."""
    return script("drawings")


def test_drawings_are_what_their_script_draws(drawings: ModuleType) -> None:
    for name, drawn in drawings.DRAWINGS.items():
        assert (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8") == drawings.svg(drawn()), name


def test_the_house_has_the_rooms_that_there_are(drawings: ModuleType) -> None:
    *_, parts = drawings.house()
    rooms = {room for box in parts if isinstance(box, drawings.Box) for room in box.words.split("\n")[0].split(", ")}
    source = ROOT / "src" / "fedloom"
    assert rooms == {room for room in rooms if (source / room).is_dir() or (source / f"{room}.py").is_file()}
    plain = {"presets", "templating", "settings", "shown", "outline", "errors"}
    folders = {path.name for path in source.iterdir() if (path / "__init__.py").is_file()}
    assert folders - plain <= rooms
