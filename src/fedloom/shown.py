"""How a value shows itself to people: on a screen of text, and as a page's part in a notebook."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.templating import render

MOST_ROWS = 20  # the rest is counted: one screen


@dataclass(frozen=True)
class Shown:
    """A title, sentences, a table of at most a screen, and pictures as PNG files."""

    title: str
    lines: Sequence[str] = ()
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    pictures: Sequence[tuple[str, bytes]] = ()

    def __str__(self) -> str:
        shown = [self.headers, *self.rows[:MOST_ROWS]] if self.rows else []
        widths = [max(len(row[place]) for row in shown) for place in range(len(self.headers))] if shown else []
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown
        ]
        return "\n".join([self.title, *self.lines, *table, *([self._more] if self._more else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return str(
            render(
                "templates/shown.html",
                {
                    "title": self.title,
                    "lines": self.lines,
                    "headers": self.headers,
                    "rows": self.rows[:MOST_ROWS],
                    "more": self._more,
                    "pictures": [(name, base64.b64encode(content).decode()) for name, content in self.pictures],
                },
            )
        )

    @property
    def _more(self) -> str:
        return f"and {len(self.rows) - MOST_ROWS:,} more" if len(self.rows) > MOST_ROWS else ""
