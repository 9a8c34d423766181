"""How long and how hard the pages are: words, the longest line, the widest table, and Flesch's reading ease.

    python scripts/readability.py README.md docs/*.md [--revision COMMIT]

Reading ease is 206.835 - 1.015 x words a sentence - 84.6 x syllables a word, of running text alone: 60 and
more is plain, 30 and less is hard. Syllables are groups of vowels, without a silent e at the end.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

MADE = re.compile(r"<!-- made from the source.*?<!-- end of what is made -->", re.DOTALL)  # nobody wrote it
CODE = re.compile(r"^```.*?^```|^ {4,}[^\n]*$|<!--.*?-->", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"^\|.*$", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
MARKUP = re.compile(r"^\s*(#+|[-*>]|\d+\.)\s|[`*_]", re.MULTILINE)


@dataclass(frozen=True)
class Measures:
    """What is counted of a page."""

    words: int
    longest: int  # characters of a line
    widest: int  # columns of a table
    ease: float


def measured(text: str) -> Measures:
    """Count all words, tables and code among them, but none made from the source; judge the ease of running text."""
    text = MADE.sub("", text)
    rows = re.findall(r"^\|(?:\s*:?-+:?\s*\|)+", text, re.MULTILINE)
    return Measures(
        words=len(text.split()),
        longest=max(map(len, text.splitlines()), default=0),
        widest=max((row.count("|") - 1 for row in rows), default=0),
        ease=reading_ease(MARKUP.sub("", LINK.sub(r"\1", TABLE.sub("", CODE.sub("", text))))),
    )


def reading_ease(text: str) -> float:
    """Flesch's formula; paragraphs and items of lists end sentences too."""
    words = re.findall(r"[A-Za-z][A-Za-z'-]*", text)
    sentences = [part for part in re.split(r"[.!?:;]\s|\n\s*\n", text) if re.search("[A-Za-z]", part)]
    if not words:
        return 100.0
    return 206.835 - 1.015 * len(words) / len(sentences) - 84.6 * sum(map(syllables, words)) / len(words)


def syllables(word: str) -> int:
    """Groups of vowels, without a silent e."""
    return max(1, len(re.findall(r"[aeiouy]+", re.sub(r"(?<=[^laeiouy])e$", "", word.lower()))))


def _text(page: str, revision: str) -> str:
    if not revision:
        return Path(page).read_text(encoding="utf-8")
    command = ["git", "show", f"{revision}:{page}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Print a row for each page, and their words together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+")
    parser.add_argument("--revision", default="", help="measure the pages of a commit")
    asked = parser.parse_args()
    found = {page: measured(_text(page, asked.revision)) for page in asked.pages}
    print(f"{'words':>7} {'longest line':>13} {'widest table':>13} {'ease':>6}  page")
    for page, each in sorted(found.items(), key=lambda item: -item[1].words):
        print(f"{each.words:7} {each.longest:13} {each.widest:13} {each.ease:6.1f}  {page}")
    print(f"{sum(each.words for each in found.values()):7} words in all")


if __name__ == "__main__":
    main()
