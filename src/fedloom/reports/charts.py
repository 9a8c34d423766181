"""Charts as inline SVG: colours come from the page's style, hover texts travel in a ``data-hover`` attribute."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, SQUARE = 440, 250, 400  # narrow enough that letters stay legible on a phone
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 12, 44
COLOURS, STYLES = 8, 3  # classes c0..c7 of the style sheet, then again with another dash or mark
TICKS = 4
LARGEST = 1e300  # beyond it differences overflow; such a value is left out like one that is not finite
EDGE = 2  # room for the outline of a box
MARKED = 15  # up to so many points a line shows each of them
NICE_STEPS = (1, 2, 2.5, 5, 10)

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """A named line or cloud; a point without a finite value is a gap.

    ``colour`` is its number among things that keep their colour from chart to chart, such as groups or runs.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0


def drawable(value: float | None) -> bool:
    """Whether a value has a place in a chart."""
    return value is not None and math.isfinite(value) and abs(value) <= LARGEST


def number(value: float | None) -> str:
    """Four significant digits; words where there is no number."""
    return f"{value:.4g}" if value is not None and math.isfinite(value) else "not finite"


def ticks(low: float, high: float, count: int = TICKS) -> list[float]:
    """Round numbers at even steps that enclose the range, about ``count`` steps apart."""
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    rough = high / count - low / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in NICE_STEPS if nice * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def whole_ticks(low: float, high: float) -> list[float]:
    """Whole numbers inside the range, for rounds."""
    inside = [tick for tick in ticks(low, high) if low <= tick <= high and tick == round(tick)]
    return inside or [low]


@dataclass(frozen=True)
class Scale:
    """Values to coordinates, linearly."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The coordinate of a value; the middle where the range is a single value."""
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return round(self.start + share * (self.end - self.start), 1)


def colour_class(index: int) -> str:
    """The style classes of a series by its number."""
    return f"c{index % COLOURS} d{index // COLOURS % STYLES}"


def legend(series: Sequence[Series], mark: str = "line") -> str:
    """Names with their colours and marks (``line`` or ``dots``); nothing where there is one series without a name."""
    if not any(one.name for one in series):
        return ""
    shape = {"line": "M1 5H21", "dots": "M11 5h.01"}[mark]
    swatch = '<svg viewBox="0 0 22 10" class="swatch" aria-hidden="true"><path class="{} {}" d="{}"/></svg>'
    items = (f"<li>{swatch.format(mark, colour_class(one.colour), shape)}{escape(one.name)}</li>" for one in series)
    return f'<ul class="legend">{"".join(items)}</ul>'


def line_chart(label: str, series: Sequence[Series], y_label: str, x_label: str = "round") -> str:
    """Lines over rounds; hover shows the values of all of them at the nearest round."""
    known = [(x, y) for one in series for x, y in one.points if y is not None and drawable(y)]
    if not known:
        return '<p class="quiet">No finite value to draw.</p>'
    y_ticks = ticks(min(y for _, y in known), max(y for _, y in known))
    xs = sorted({x for x, _ in known})
    across = Scale(xs[0], xs[-1], LEFT, WIDTH - RIGHT)
    up = Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_frame(across, up, whole_ticks(xs[0], xs[-1]), y_ticks, x_label, y_label, WIDTH, HEIGHT)]
    parts += [_line(one, across, up) for one in series]
    parts.append(f'<path class="rule" d="M0 {TOP}V{HEIGHT - BOTTOM}" visibility="hidden"/>')
    values = [(one.name or y_label, dict(one.points)) for one in series]
    texts = {
        x: "\n".join([f"{x_label} {x:g}", *(f"{name}: {number(found[x])}" for name, found in values if x in found)])
        for x in xs
    }
    hover = [[across(x), None, text] for x, text in texts.items()]
    return _svg(label, WIDTH, HEIGHT, parts, hover, "x") + legend(series)


def scatter(
    label: str,
    clouds: Sequence[Series],
    x_label: str,
    y_label: str,
    crosses: Mapping[str, tuple[float, float]],
    background: Sequence[Point] = (),
) -> str:
    """Points in the plane before a faint background; ``crosses`` are named places."""

    def places(points: Iterable[Point]) -> list[tuple[float, float]]:
        return [(x, y) for x, y in points if drawable(x) and y is not None and drawable(y)]

    known = places([*(point for cloud in clouds for point in cloud.points), *background, *crosses.values()])
    if not known:
        return '<p class="quiet">No finite value to draw.</p>'
    x_ticks, y_ticks = (ticks(min(values), max(values)) for values in zip(*known, strict=True))
    across = Scale(*_padded([x for x, _ in known]), LEFT, SQUARE - RIGHT)
    up = Scale(*_padded([y for _, y in known]), SQUARE - BOTTOM, TOP)
    parts = [_frame(across, up, _inside(x_ticks, across), _inside(y_ticks, up), x_label, y_label, SQUARE, SQUARE)]
    behind = [(across(x), up(y)) for x, y in places(background)]
    parts.append(f'<path class="dots behind" d="{_dots(behind)}"/>')
    hover: list[list[object]] = []
    for cloud in clouds:
        dots = [(across(x), up(y)) for x, y in places(cloud.points)]
        parts.append(f'<path class="dots {colour_class(cloud.colour)}" d="{_dots(dots)}"/>')
        hover += [[x, y, cloud.name] for x, y in dots]
    for name, (x, y) in crosses.items():
        left, top = across(x), up(y)
        parts.append(f'<path class="cross" d="M{left - 6} {top}h12M{left} {top - 6}v12"/>')
        hover.append([left, top, name])
    return _svg(label, SQUARE, SQUARE, parts, hover, "xy") + legend(clouds, "dots")


def _dots(places: Iterable[tuple[float, float]]) -> str:
    """A path of strokes almost without length (without any, some printers drop them): one element for all points."""
    return "".join(f"M{x} {y}h.01" for x, y in places)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """The range of values with some air around it."""
    low, high = min(values), max(values)
    air = 0.04 * (high - low) or 1.0
    return low - air, high + air


def _inside(marks: Iterable[float], scale: Scale) -> list[float]:
    return [mark for mark in marks if scale.low <= mark <= scale.high]


def bars(label: str, counts: Mapping[str, float]) -> str:
    """A small histogram without axes, for a cell of a table; hover names the bar."""
    width, height = max(60, 9 * len(counts)), 34
    most = max(counts.values(), default=0) or 1
    parts, hover = [f'<path class="axis" d="M0 {height - 0.5}H{width}"/>'], []
    for index, (name, count) in enumerate(counts.items()):
        tall = round((height - 3) * count / most, 1)
        parts.append(f'<rect class="bar" x="{9 * index + 1}" y="{height - 1 - tall}" width="7" height="{tall}"/>')
        hover.append([9 * index + 4.5, None, f"{name}: {count:,}"])
    return _svg(label, width, height, parts, hover, "x", "histogram")


# The head of an arrow, once on a page that has sharing diagrams.
ARROW_HEAD = (
    '<svg class="defs" width="0" height="0" aria-hidden="true"><defs><marker id="arrow" viewBox="0 0 8 8" refX="7" '
    'refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8Z"/>'
    "</marker></defs></svg>"
)


@dataclass(frozen=True)
class Copy:
    """A box at the server: whose copy of which block."""

    block: str
    owner: str
    scope: str


@dataclass(frozen=True)
class Link:
    """What passes between silos (left, by number) and a copy (right, by number)."""

    silos: int
    copy: int
    up: bool
    down: bool


def sharing_diagram(silos: Sequence[tuple[str, str, str]], copies: Sequence[Copy], links: Sequence[Link]) -> str:
    """Silos at the left (name, how many, what stays there), the server's copies at the right, arrows between them."""
    box, gap, wide = 46, 14, 150
    height = max(len(silos), len(copies), 1) * (box + gap) + 30

    def middles(count: int) -> list[float]:
        used = count * (box + gap) - gap
        return [30 + (height - 30 - used) / 2 + index * (box + gap) + box / 2 for index in range(count)]

    left, right = middles(len(silos)), middles(len(copies))
    parts = [
        f'<text class="head-line" x="{EDGE + wide / 2}" y="16">silos</text>',
        f'<text class="head-line" x="{WIDTH - EDGE - wide / 2}" y="16">server</text>',
    ]
    for link in links:
        y1, y2 = left[link.silos], right[link.copy]
        start, end, bend = EDGE + wide + 3, WIDTH - EDGE - wide - 3, WIDTH / 2
        arrows = (' marker-end="url(#arrow)"' if link.up else "") + (' marker-start="url(#arrow)"' if link.down else "")
        scope = escape(copies[link.copy].scope, quote=True)
        parts.append(f'<path class="flow {scope}" d="M{start} {y1}C{bend} {y1} {bend} {y2} {end} {y2}"{arrows}/>')
    for (name, many, stays), middle in zip(silos, left, strict=True):
        parts.append(_box(EDGE, middle, wide, box, "party", name, f"{many}; keeps {stays}" if stays else many))
    for copy, middle in zip(copies, right, strict=True):
        parts.append(_box(WIDTH - EDGE - wide, middle, wide, box, f"copy {escape(copy.scope)}", copy.block, copy.owner))
    return _svg("Who shares what with the server", WIDTH, round(height), parts, [], "x", "sharing")


def _box(x: float, middle: float, width: float, height: float, style: str, title: str, below: str) -> str:
    def line(text: str, most: int, y: float, kind: str) -> str:
        return f'<text class="{kind}" x="{x + width / 2}" y="{y}">{escape(_shortened(text, most))}</text>'

    rect = f'<rect class="{style}" x="{x}" y="{middle - height / 2}" width="{width}" height="{height}" rx="6"/>'
    hint = f"<title>{escape(f'{title}: {below}')}</title>"
    return f"<g>{hint}{rect}{line(title, 17, middle - 4, 'name')}{line(below, 22, middle + 13, 'note')}</g>"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _line(one: Series, across: Scale, up: Scale) -> str:
    """A path with gaps where a value is missing, and dots where points are few or alone."""
    style, pieces = colour_class(one.colour), []
    runs = itertools.groupby(one.points, key=lambda point: drawable(point[1]))
    whole = [[(across(x), up(y)) for x, y in points if y is not None] for good, points in runs if good]
    for piece in whole:
        if len(piece) > 1:
            pieces.append("M" + "L".join(f"{x} {y}" for x, y in piece))
    dotted = [place for piece in whole for place in piece if len(one.points) <= MARKED or len(piece) == 1]
    return f'<path class="line {style}" d="{"".join(pieces)}"/><path class="dots {style}" d="{_dots(dotted)}"/>'


def _frame(
    across: Scale,
    up: Scale,
    x_ticks: Iterable[float],
    y_ticks: Iterable[float],
    x_label: str,
    y_label: str,
    width: int,
    height: int,
) -> str:
    """Grid lines, tick labels and the names of the axes."""
    parts = []
    for tick in y_ticks:
        y = up(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{width - RIGHT}"/>')
        parts.append(f'<text class="tick y" x="{LEFT - 6}" y="{y + 4}">{_tick(tick)}</text>')
    for tick in x_ticks:
        parts.append(f'<text class="tick x" x="{across(tick)}" y="{height - BOTTOM + 16}">{_tick(tick)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{height - BOTTOM}H{width - RIGHT}"/>')
    middle = (LEFT + width - RIGHT) / 2
    parts.append(f'<text class="axis-name" x="{middle}" y="{height - 6}">{escape(x_label)}</text>')
    up_text = f'x="{-(TOP + height - BOTTOM) / 2}" y="13" transform="rotate(-90)"'
    parts.append(f'<text class="axis-name" {up_text}>{escape(y_label)}</text>')
    return "".join(parts)


def _tick(value: float) -> str:
    return f"{value + 0.0:.6g}".replace("e+0", "e").replace("e+", "e")  # + 0.0: no minus before zero


def _svg(
    label: str,
    width: int,
    height: int,
    parts: Iterable[str],
    hover: Sequence[Sequence[object]],
    snap: str,
    style: str = "chart",
) -> str:
    data = f' data-snap="{snap}" data-hover="{escape(json.dumps(hover), quote=True)}"' if hover else ""
    view = f'viewBox="0 0 {width} {height}"'
    return (
        f'<svg class="{style}" {view} role="img" aria-label="{escape(label, quote=True)}"{data}>{"".join(parts)}</svg>'
    )
