"""Figures 4 and 5 of ALIGN-FL: the sound probe against epsilon, and against the weight of the gradient penalty.

    python papers/align-fl/figures4and5.py [figures4and5.svg]

Drawn from the result files so far: a point is the mean over seeds, its line their range. The paper gives no numbers for
its figures; the dashed lines are the rows of its Table II.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from fedloom.reproduction.rendering import Line
from fedloom.reproduction.results import Results
from fedloom.reproduction.tables import load_table

PAPER = Path(__file__).parent
COLUMN = "accuracy, %, sound"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, GAP = 380, 280, 45, 45, 30, 20
COLOUR, PUBLISHED = "#0b6e99", "#b3362b"
TICKS = range(0, 101, 20)


def up(accuracy: float) -> float:
    """Where an accuracy lies on the picture."""
    return HEIGHT - BOTTOM - accuracy / 100 * (HEIGHT - TOP - BOTTOM)


def panel(title: str, points: Mapping[str, Sequence[float]], published: Mapping[str, float]) -> list[str]:
    """One part of a figure, at the picture's corner; points stand at equal distances."""
    step = (WIDTH - LEFT - GAP) / len(points)
    places = {label: LEFT + step * (number + 0.5) for number, label in enumerate(points)}
    parts = [f'<text x="{LEFT}" y="18" font-weight="bold">{title}</text>']
    for tick in TICKS:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - GAP}" y1="{up(tick):.1f}" y2="{up(tick):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    for label, x in places.items():
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    for label, value in published.items():
        x, y = places[label], up(value)
        dashes = f'stroke="{PUBLISHED}" stroke-dasharray="4 3"'
        parts.append(f'<line x1="{x - 18:.1f}" x2="{x + 18:.1f}" y1="{y:.1f}" y2="{y:.1f}" {dashes}/>')
    known = {label: values for label, values in points.items() if values}
    corners = " ".join(f"{places[label]:.1f},{up(mean(values)):.1f}" for label, values in known.items())
    parts.append(f'<polyline points="{corners}" fill="none" stroke="{COLOUR}"/>')
    for label, values in known.items():
        x, low, high = places[label], up(min(values)), up(max(values))
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{COLOUR}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{up(mean(values)):.1f}" r="4" fill="{COLOUR}"/>')
    return parts


def drawing(results: Results) -> str:
    """Both figures above each other, the data sets side by side, as SVG."""
    published = {row.identity: row.published["accuracy"] for row in load_table("align-fl/table2").rows}
    drawn: list[str] = []
    for down, name in enumerate(("align-fl/fig4", "align-fl/fig5")):
        table = load_table(name)
        column = table.column(COLUMN)
        for across, part in enumerate(table.parts):
            points = {row.name: Line(table, row, results.of(row.identity)).values(column) for row in part.rows}
            known = {row.name: published[row.identity] for row in part.rows if row.identity in published}
            corner = f"translate({across * WIDTH} {down * HEIGHT})"
            drawn += [f'<g transform="{corner}">', *panel(f"{table.title}: {part.title}", points, known), "</g>"]
    note = "accuracy of the sound probe, %; dashed: published, by the paper's own protocol"
    drawn.append(f'<text x="{LEFT}" y="{2 * HEIGHT + 12}" fill="#555">{note}</text>')
    size = f'width="{2 * WIDTH}" height="{2 * HEIGHT + 20}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>", ""])


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    path.write_text(drawing(Results.read(PAPER / "results")), encoding="utf-8")
