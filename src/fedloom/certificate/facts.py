"""A certificate as values: its sentences, from which both pages are drawn, and what machines read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import fedloom
from fedloom.certificate.glossary import words_used
from fedloom.certificate.matter import Matter
from fedloom.certificate.sentences import Passage, sections_about, verdict
from fedloom.release.standing import Worth

SCHEMA, KIND = 1, "privacy certificate"
TITLE = "Privacy certificate"


@dataclass(frozen=True)
class Certificate:
    """All that both pages say, in their order."""

    matter: Matter
    statements: str = ""  # the bundle, as it lies in the run's folder

    @property
    def title(self) -> str:
        """What stands on top."""
        return f"{TITLE}: {self.matter.run}"

    @property
    def tone(self) -> str:
        """How the first sentence is to be taken: good, careful or bad."""
        if self.matter.worth == Worth.NONE or self.matter.objections:
            return "bad"
        return "good" if self.matter.worth == Worth.SIGNED and not self.matter.is_vacuous else "careful"

    @cached_property
    def verdict(self) -> str:
        """The first sentence."""
        return verdict(self.matter)

    @cached_property
    def sections(self) -> tuple[Passage, ...]:
        """Questions and answers; the last explains the words that the others use."""
        asked = sections_about(self.matter)
        words = words_used([self.title, self.verdict, *_texts(asked)])
        return (*asked, Passage("What do the words mean?", (), (), tuple(words.items())))

    @property
    def footer(self) -> str:
        """What stands at the foot."""
        return f"Made with fedloom {fedloom.__version__}."

    @property
    def texts(self) -> list[str]:
        """Every text of it, in order."""
        return [self.title, self.verdict, *_texts(self.sections), self.footer]

    def to_mapping(self) -> dict[str, Any]:
        """What ``certificate.json`` holds."""
        return {
            "schema": SCHEMA,
            "kind": KIND,
            "fedloom": fedloom.__version__,
            "verdict": self.verdict,
            "sections": [asdict(section) for section in self.sections],
            "matter": self.matter.to_mapping(),
            "statements": self.statements,
        }


def glued(text: str) -> str:
    """As it is drawn: a number and its % stay on one line."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _texts(sections: tuple[Passage, ...]) -> Iterator[str]:
    for section in sections:
        yield section.title
        yield from section.sentences
        yield from section.headers
        yield from (cell for row in section.rows for cell in row if cell)
