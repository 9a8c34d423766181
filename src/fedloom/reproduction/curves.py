"""A table as a picture: means over seeds of one column from row to row, a line for each part, bars of a deviation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import mean, stdev

from fedloom.reports.charts import Scale, ticks
from fedloom.reproduction.figures import COLOURS

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 12, 44
LINE = 16  # of the legend


@dataclass(frozen=True)
class Curve:
    """What the runs of each row have, by the rows' names; a row without runs is a gap."""

    name: str
    values: dict[str, list[float]]

    def points(self) -> dict[str, tuple[float, float]]:
        """Mean and sample deviation of each row that has runs."""
        known = {row: values for row, values in self.values.items() if values}
        return {row: (mean(values), stdev(values) if len(values) > 1 else 0.0) for row, values in known.items()}


def drawn(curves: Sequence[Curve], across: str, up: str) -> str:
    """An SVG file; rows stand at equal distances, in the order in which they come."""
    places = list(dict.fromkeys(row for curve in curves for row in curve.values))
    bars = [(middle - spread, middle + spread) for curve in curves for middle, spread in curve.points().values()]
    steps = ticks(min(low for low, _ in bars), max(high for _, high in bars))
    horizontal = Scale(0, max(len(places) - 1, 1), LEFT + 20, WIDTH - RIGHT - 20)
    vertical = Scale(steps[0], steps[-1], HEIGHT - BOTTOM, TOP)
    height = HEIGHT + LINE * len(curves)
    size = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for step in steps:
        y = vertical(step)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{step:g}</text>')
    below = HEIGHT - BOTTOM + 16
    parts += [
        f'<text x="{horizontal(place)}" y="{below}" text-anchor="middle">{escape(row)}</text>'
        for place, row in enumerate(places)
    ]
    centre, middle = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts += [
        f'<text x="{centre}" y="{below + 18}" text-anchor="middle">{escape(across)}</text>',
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(up)}</text>',
    ]
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        parts += _line(curve, places, horizontal, vertical, colour)
        y = HEIGHT + LINE * number
        parts.append(f'<path d="M{LEFT} {y}h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 26}" y="{y + 4}">{escape(curve.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _line(curve: Curve, places: Sequence[str], horizontal: Scale, vertical: Scale, colour: str) -> list[str]:
    parts, path, pen, points = [], "", "M", curve.points()
    for place, row in enumerate(places):
        if row not in points:
            pen = "M"
            continue
        x, (middle, spread) = horizontal(place), points[row]
        path, pen = f"{path}{pen}{x} {vertical(middle)}", "L"
        parts.append(
            f'<g stroke="{colour}"><title>{escape(row)}: {middle:.2f} ± {spread:.2f}</title>'
            f'<path d="M{x} {vertical(middle - spread)}V{vertical(middle + spread)}"/>'
            f'<circle cx="{x}" cy="{vertical(middle)}" r="3" fill="{colour}"/></g>'
        )
    return [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>', *parts]
