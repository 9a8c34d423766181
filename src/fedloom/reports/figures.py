"""What a page shows with a caption: pictures, charts, and the cells of tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup
from torch import Tensor

from fedloom.modalities.base import modality_of
from fedloom.reports.pictures import grid
from fedloom.templating import render


@dataclass(frozen=True)
class Listing:
    """A table's cells; columns in ``right`` hold numbers, and ``best`` are the best of a row, by row and column."""

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: Collection[int] = ()
    best: Collection[tuple[int, int]] = ()


@dataclass(frozen=True)
class Figure:
    """A picture, chart or table with its caption; figures of one ``row`` stand beside each other under its name."""

    caption: str
    picture: str = ""  # a data URI
    chart: Markup = field(default_factory=Markup)  # SVG, or a table
    row: str = ""


@dataclass(frozen=True)
class Panel:
    """One part of the page; without figures, ``missing`` says why."""

    title: str
    intro: str
    figures: tuple[Figure, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""


def figure_of(caption: str, x: Tensor, kind: str, columns: int = 0, row: str = "") -> Figure:
    """Records of a kind as people look at them; pictures in so many columns, rows of a table one by one."""
    shown = modality_of(kind, tuple(x.shape[1:])).shown(x)
    if not isinstance(shown, Mapping):
        return Figure(caption, grid(x, columns, kind=kind), row=row)
    rows = list(zip(*(column.tolist() for column in shown.values()), strict=True))
    numbers = [place for place, column in enumerate(shown.values()) if column.dtype.kind != "U"]
    listing = Listing(tuple(shown), [[_told(cell) for cell in each] for each in rows], right=numbers)
    return Figure(caption, chart=render("reports/templates/records.html", {"records": listing}), row=row)


def _told(cell: object) -> object:
    return f"{cell:.4g}" if isinstance(cell, float) else cell
