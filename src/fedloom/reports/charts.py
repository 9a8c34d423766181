"""All charts as SVG: where things lie is computed here, and templates draw it.

On a page colours come from its style, and hover texts travel in a ``data-hover`` attribute.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from markupsafe import Markup

from fedloom.templating import render

COLOURS, STYLES = 8, 3  # classes c0..c7 of the style sheet, then again with another dash or mark
PALETTE = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
TICKS = 4
LARGEST = 1e300  # beyond it differences overflow; such a value is left out like one that is not finite
UPRIGHT = 34  # letters that an upright name has room for; the caption has all of it
EDGE = 2  # room for the outline of a box
MARKED = 15  # up to so many points a line shows each of them
NICE_STEPS = (1, 2, 2.5, 5, 10)

Point = tuple[float, float | None]
Place = tuple[float, float]


@dataclass(frozen=True)
class Area:
    """A chart's size, and where in it values are drawn: around that there is room for ticks and names."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


LINES = Area(440, 250, left=66, right=426, top=12, bottom=206)  # narrow enough that letters stay legible on a phone
CLOUDS = Area(400, 400, left=66, right=386, top=12, bottom=356)
ROWS = Area(640, 300, left=60, right=620, top=12, bottom=256)
DIAGRAM = 440  # wide


@dataclass(frozen=True)
class Series:
    """A named line or cloud; a point without a finite value is a gap.

    ``colour`` is its number among things that keep their colour from chart to chart, such as groups or runs.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0

    @property
    def style(self) -> str:
        """Its classes of the style sheet."""
        return f"c{self.colour % COLOURS} d{self.colour // COLOURS % STYLES}"


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
class AxisScale:
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


@dataclass(frozen=True)
class Axes:
    """What surrounds a chart: grid lines and ticks as coordinate and text, and what is counted along each side."""

    area: Area
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    x_label: str
    y_label: str


def _draw(template: str, values: Mapping[str, object]) -> Markup:
    return render(f"reports/templates/charts/{template}", values)


def _ticks(values: Iterable[float], scale: AxisScale) -> list[tuple[float, str]]:
    """Those inside the range."""
    return [(scale(value), _tick(value)) for value in values if scale.low <= value <= scale.high]


def _tick(value: float) -> str:
    return f"{value + 0.0:.6g}".replace("e+0", "e").replace("e+", "e")  # + 0.0: no minus before zero


def line_chart(
    label: str, series: Sequence[Series], y_label: str, x_label: str = "round", *, whole: bool = True
) -> Markup:
    """Lines over rounds, or what else is counted; hover shows the values of all of them at the nearest."""
    known = [(x, y) for one in series for x, y in one.points if y is not None and drawable(y)]
    if not known:
        return _draw("nothing.html", {})
    steps = ticks(min(y for _, y in known), max(y for _, y in known))
    xs = sorted({x for x, _ in known})
    across = AxisScale(xs[0], xs[-1], LINES.left, LINES.right)
    up = AxisScale(steps[0], steps[-1], LINES.bottom, LINES.top)
    x_ticks = (whole_ticks if whole else ticks)(xs[0], xs[-1])
    axes = Axes(LINES, _ticks(x_ticks, across), _ticks(steps, up), x_label, _shortened(y_label, UPRIGHT))
    named = [(one.name or y_label, dict(one.points)) for one in series]
    texts = (
        "\n".join([f"{x_label} {x:g}", *(f"{name}: {number(found[x])}" for name, found in named if x in found)])
        for x in xs
    )
    hover = json.dumps([[across(x), None, text] for x, text in zip(xs, texts, strict=True)])
    lines = [(one, *_line(one, across, up)) for one in series]
    return _draw("lines.html", {"label": label, "axes": axes, "lines": lines, "hover": hover})


def _line(one: Series, across: AxisScale, up: AxisScale) -> tuple[str, str]:
    """A path with gaps where a value is missing, and one of dots where points are few or alone."""
    runs = itertools.groupby(one.points, key=lambda point: drawable(point[1]))
    whole = [[(across(x), up(y)) for x, y in points if y is not None] for good, points in runs if good]
    dotted = [place for piece in whole for place in piece if len(one.points) <= MARKED or len(piece) == 1]
    return "".join(map(_path, whole)), _dots(dotted)


def _path(places: Sequence[Place]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in places) if len(places) > 1 else ""


def _dots(places: Iterable[Place]) -> str:
    """A path of strokes almost without length (without any, some printers drop them): one element for all points."""
    return "".join(f"M{x} {y}h.01" for x, y in places)


def scatter(
    label: str,
    clouds: Sequence[Series],
    x_label: str,
    y_label: str,
    crosses: Mapping[str, Place],
    background: Sequence[Point] = (),
) -> Markup:
    """Points in the plane before a faint background; ``crosses`` are named places."""

    def known(points: Iterable[Point]) -> list[Place]:
        return [(x, y) for x, y in points if drawable(x) and y is not None and drawable(y)]

    everything = known([*(point for cloud in clouds for point in cloud.points), *background, *crosses.values()])
    if not everything:
        return _draw("nothing.html", {})
    xs, ys = zip(*everything, strict=True)
    across, up = AxisScale(*_padded(xs), CLOUDS.left, CLOUDS.right), AxisScale(*_padded(ys), CLOUDS.bottom, CLOUDS.top)
    x_ticks, y_ticks = (_ticks(ticks(min(ends), max(ends)), scale) for ends, scale in ((xs, across), (ys, up)))

    def placed(points: Iterable[Point]) -> list[Place]:
        return [(across(x), up(y)) for x, y in known(points)]

    named = [(cloud, placed(cloud.points)) for cloud in clouds]
    centres = {name: (across(x), up(y)) for name, (x, y) in crosses.items()}
    hover = [[x, y, cloud.name] for cloud, places in named for x, y in places]
    hover += [[x, y, name] for name, (x, y) in centres.items()]
    values = {
        "label": label,
        "axes": Axes(CLOUDS, x_ticks, y_ticks, x_label, y_label),
        "behind": _dots(placed(background)),
        "clouds": [(cloud, _dots(places)) for cloud, places in named],
        "crosses": [f"M{x - 6} {y}h12M{x} {y - 6}v12" for x, y in centres.values()],
        "hover": json.dumps(hover),
    }
    return _draw("clouds.html", values)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """The range of values with some air around it."""
    low, high = min(values), max(values)
    air = 0.04 * (high - low) or 1.0
    return low - air, high + air


def bars(label: str, counts: Mapping[str, float], most: float = 0) -> Markup:
    """A small histogram without axes, for a cell of a table, as high as ``most`` where told; hover names a bar."""
    height, most = 34, most or max(counts.values(), default=0) or 1
    hover = [[9 * index + 4.5, None, f"{name}: {count:,}"] for index, (name, count) in enumerate(counts.items())]
    values = {
        "label": label,
        "width": max(60, 9 * len(counts)),
        "height": height,
        "bars": [(9 * index + 1, round((height - 3) * count / most, 1)) for index, count in enumerate(counts.values())],
        "hover": json.dumps(hover) if hover else "",
    }
    return _draw("bars.svg", values)


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


@dataclass(frozen=True)
class _Box:
    """A rectangle with two lines of text around its ``middle``."""

    left: int
    middle: float
    style: str
    title: str
    below: str

    def lines(self) -> tuple[str, str]:
        """The texts, as much of them as there is room for."""
        return _shortened(self.title, 17), _shortened(self.below, 22)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def sharing_diagram(silos: Sequence[tuple[str, str, str]], copies: Sequence[Copy], links: Sequence[Link]) -> Markup:
    """Silos at the left (name, how many, what stays there), the server's copies at the right, arrows between them."""
    box, gap, wide = 46, 14, 150
    height = max(len(silos), len(copies), 1) * (box + gap) + 30

    def middles(count: int) -> list[float]:
        used = count * (box + gap) - gap
        return [30 + (height - 30 - used) / 2 + index * (box + gap) + box / 2 for index in range(count)]

    left, right, far = middles(len(silos)), middles(len(copies)), DIAGRAM - EDGE - wide
    boxes = [
        _Box(EDGE, middle, "party", name, f"{many}; keeps {stays}" if stays else many)
        for (name, many, stays), middle in zip(silos, left, strict=True)
    ]
    boxes += [
        _Box(far, middle, f"copy {copy.scope}", copy.block, copy.owner)
        for copy, middle in zip(copies, right, strict=True)
    ]
    start, end, bend = EDGE + wide + 3, far - 3, DIAGRAM / 2
    curves = ((link, left[link.silos], right[link.copy]) for link in links)
    values = {
        "width": DIAGRAM,
        "height": height,
        "heads": {"silos": EDGE + wide / 2, "server": far + wide / 2},
        "flows": [
            (link, copies[link.copy].scope, f"M{start} {y1}C{bend} {y1} {bend} {y2} {end} {y2}")
            for link, y1, y2 in curves
        ],
        "boxes": boxes,
        "box": {"width": wide, "height": box},
    }
    return _draw("sharing.svg", values)


@dataclass(frozen=True)
class Curve:
    """What the runs of each row have, by the rows' names; a row without runs is a gap."""

    name: str
    values: dict[str, list[float]]

    def points(self) -> dict[str, Place]:
        """Mean and sample deviation of each row that has runs."""
        known = {row: values for row, values in self.values.items() if values}
        return {row: (mean(values), stdev(values) if len(values) > 1 else 0.0) for row, values in known.items()}


@dataclass(frozen=True)
class _Mark:
    """A row's mean and the ends of its deviation as coordinates; the hint has them in numbers."""

    x: float
    y: float
    low: float
    high: float
    hint: str


def row_chart(curves: Sequence[Curve], x_label: str, y_label: str) -> Markup:
    """A file of its own: means over runs with bars of a deviation; rows stand at equal distances, as they come."""
    rows = list(dict.fromkeys(row for curve in curves for row in curve.values))
    ends = [(middle - spread, middle + spread) for curve in curves for middle, spread in curve.points().values()]
    steps = ticks(min(low for low, _ in ends), max(high for _, high in ends))
    across = AxisScale(0, max(len(rows) - 1, 1), ROWS.left + 20, ROWS.right - 20)
    up, places = AxisScale(steps[0], steps[-1], ROWS.bottom, ROWS.top), {row: across(i) for i, row in enumerate(rows)}
    lines = []
    for place, curve in enumerate(curves):
        marks = {
            row: _Mark(places[row], up(mid), up(mid - spread), up(mid + spread), f"{row}: {mid:.2f} ± {spread:.2f}")
            for row, (mid, spread) in curve.points().items()
        }
        pieces = [list(piece) for known, piece in itertools.groupby(rows, marks.__contains__) if known]
        path = "".join("M" + "L".join(f"{marks[row].x} {marks[row].y}" for row in piece) for piece in pieces)
        in_order = [marks[row] for row in rows if row in marks]
        lines.append((curve.name, PALETTE[place % len(PALETTE)], path, in_order))
    x_ticks, y_ticks = [(x, row) for row, x in places.items()], [(up(step), f"{step:g}") for step in steps]
    return _draw("rows.svg", {"axes": Axes(ROWS, x_ticks, y_ticks, x_label, y_label), "lines": lines})
