"""Figures 4 and 5 of ALIGN-FL: the sound probe against epsilon, and against the weight of the gradient penalty.

    python papers/align-fl/figures4and5.py [figures4and5.svg]

Drawn from what benchmarks/align_fl.py has measured so far: a point is the mean over seeds, its line their range. The
paper gives no numbers for its figures; the dashed lines are the rows of its Table II.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

RESULTS = Path(__file__).parents[2] / "benchmarks/results/align_fl-cuda.json"
KEY = "probe/accuracy/n10000"
# Where a point lies on its axis -> the row that is it; points stand at equal distances.
EPSILONS = {
    "1": "figure4/mnist/epsilon-1",
    "5": "figure4/mnist/epsilon-5",
    "10": "table2/mnist/dp-sgd",
    "15": "figure4/mnist/epsilon-15",
    "20": "figure4/mnist/epsilon-20",
    "infinity": "table2/mnist/no-dp",
}
PENALTIES = {
    "0": "table2/mnist/no-dp",
    "0.01": "figure5/mnist/penalty-0.01",
    "0.05": "figure5/mnist/penalty-0.05",
    "0.1": "figure5/mnist/penalty-0.1",
    "0.5": "figure5/mnist/penalty-0.5",
    "1": "table2/mnist/lcd-vae",
}
PANELS = {
    "Figure 4: epsilon": (EPSILONS, {"10": 51.75, "infinity": 74.25}),
    "Figure 5: weight of the penalty": (PENALTIES, {"0": 74.25, "1": 63.25}),
}
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, GAP = 380, 300, 45, 45, 30, 20
COLOUR, PUBLISHED = "#0b6e99", "#b3362b"
TICKS = range(0, 101, 20)


def measured() -> dict[str, list[float]]:
    """The accuracies of each row, in %, one for each seed."""
    found: dict[str, list[float]] = {}
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        found.setdefault(row["row"], []).append(100 * row["metrics"][KEY])
    return found


def up(accuracy: float) -> float:
    """Where an accuracy lies on the picture."""
    return HEIGHT - BOTTOM - accuracy / 100 * (HEIGHT - TOP - BOTTOM)


def panel(title: str, points: dict[str, str], published: dict[str, float], found: dict[str, list[float]]) -> list[str]:
    """One figure, at the picture's left edge."""
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
    known = {label: found[row] for label, row in points.items() if row in found}
    corners = " ".join(f"{places[label]:.1f},{up(mean(values)):.1f}" for label, values in known.items())
    parts.append(f'<polyline points="{corners}" fill="none" stroke="{COLOUR}"/>')
    for label, values in known.items():
        x, low, high = places[label], up(min(values)), up(max(values))
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{COLOUR}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{up(mean(values)):.1f}" r="4" fill="{COLOUR}"/>')
    return parts


def drawing() -> str:
    """Both figures side by side, as SVG."""
    found, parts = measured(), []
    for number, (title, (points, published)) in enumerate(PANELS.items()):
        inner = panel(title, points, published, found)
        parts += [f'<g transform="translate({number * WIDTH} 0)">', *inner, "</g>"]
    note = "accuracy of the sound probe, %; dashed: published, by the paper's own protocol"
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}" fill="#555">{note}</text>')
    size = f'width="{2 * WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    path.write_text(drawing(), encoding="utf-8")
