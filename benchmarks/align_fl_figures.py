"""Figures like ALIGN-FL's 2, 3 and 7 to 11, from what ``benchmarks/align_fl.py --pictures`` wrote.

python benchmarks/align_fl_figures.py pictures.json papers/align-fl/figures
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

ROWS = {
    "table2/mnist/no-dp": "no privacy",
    "table2/mnist/dp-sgd": "DP-SGD, epsilon 10",
    "table2/mnist/lcd-vae": "the paper's penalty",
    "table3/fedavg": "FedAvg",
    "table3/moon": "MOON",
    "variants/centralised": "centralised",
}
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
SIDE, GAP, TITLE, PANEL = 28, 12, 16, 240


def sheet(images: Sequence[Sequence[int]], columns: int) -> Image.Image:
    """Images side by side."""
    rows = -(-len(images) // columns)
    canvas = np.full((rows * SIDE, columns * SIDE), 255, dtype=np.uint8)
    for number, image in enumerate(images):
        top, left = number // columns * SIDE, number % columns * SIDE
        canvas[top : top + SIDE, left : left + SIDE] = np.array(image, dtype=np.uint8).reshape(SIDE, SIDE)
    return Image.fromarray(canvas).convert("RGB")


def scatter(codes: Sequence[Sequence[float]]) -> Image.Image:
    """Two latents of each held-out image, coloured by class; the middle 98 % of both."""
    places, labels = np.array([code[:2] for code in codes]), [int(code[2]) for code in codes]
    low, high = np.quantile(places, 0.01, axis=0), np.quantile(places, 0.99, axis=0)
    panel = Image.new("RGB", (PANEL, PANEL), "white")
    draw = ImageDraw.Draw(panel)
    for (x, y), label in zip((places - low) / (high - low) * (PANEL - 8) + 4, labels, strict=True):
        draw.ellipse((x - 1.5, y - 1.5, x + 1.5, y + 1.5), fill=COLOURS[label])
    return panel


def titled(panels: dict[str, Image.Image]) -> Image.Image:
    """Panels from left to right under their titles."""
    width = sum(panel.width + GAP for panel in panels.values())
    canvas = Image.new("RGB", (width, TITLE + max(panel.height for panel in panels.values())), "white")
    draw, left = ImageDraw.Draw(canvas), 0
    for title, panel in panels.items():
        draw.text((left, 2), title, fill="black")
        canvas.paste(panel, (left, TITLE))
        left += panel.width + GAP
    return canvas


def main() -> None:
    pictures = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    found = {title: pictures[row] for row, title in ROWS.items() if row in pictures}
    titled({t: sheet(p["samples"], 8) for t, p in found.items()}).save(folder / "samples.png", optimize=True)
    titled({t: scatter(p["codes"]) for t, p in found.items()}).save(folder / "latents.png", optimize=True)
    exposed = {
        t: [image for part in p["exposed"].values() for image in part] for t, p in found.items() if "exposed" in p
    }
    titled({t: sheet(images, 10) for t, images in exposed.items()}).save(folder / "outliers.png", optimize=True)


if __name__ == "__main__":
    main()
