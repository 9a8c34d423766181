"""Pages as a strict reader sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "img", "input", "br", "link"}


@dataclass
class Page(HTMLParser):
    """A page as a strict reader sees it: every element closed, every attribute noted."""

    html: str
    elements: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    text: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(str(self.html))  # markup would escape what it is joined with
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        assert len(attrs) == len(dict(attrs)), f"an attribute twice: {tag} {attrs}"
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] not in ("script", "style"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of every element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    def values(self, attribute: str) -> list[str]:
        """Every value of an attribute."""
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]

    def assert_harmless(self) -> None:
        """One script, no handler, no style attribute, no address but fragments and embedded pictures."""
        assert len(self.all("script")) == len(self.all("style")) == 1
        assert {tag for tag, _ in self.elements}.isdisjoint({"iframe", "object", "embed", "link", "base", "form"})
        names = {name for _, attributes in self.elements for name in attributes}
        assert not {name for name in names if name.startswith("on")} | (names & {"style", "srcset", "xlink:href"})
        assert all(value.startswith("#") for value in self.values("href"))
        assert all(
            value.startswith(("data:image/png;base64,", "data:image/jpeg;base64,")) for value in self.values("src")
        )
        ids = self.values("id")
        assert len(ids) == len(set(ids))
        assert {value[1:] for value in self.values("href")} <= set(ids)
