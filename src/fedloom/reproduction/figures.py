"""Pictures of runs, the rows of a part side by side; each run is put at its row's place when it has ended."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from fedloom.experiment import Run
from fedloom.federation.records import Federation
from fedloom.reports.charts import PALETTE
from fedloom.reproduction.tables import Part, Row, load_table, table_names
from fedloom.runs.files import explained, write_atomically
from fedloom.runs.folder import RunFolder

LATENTS = "latents.png"  # in a run folder
RUNS = "runs"  # in a sheet: which run each of its places is for
SHOWN, PANEL = 2000, 240  # test images whose latents are drawn; pixels of a side
ACROSS = 3  # rows of a table beside each other
GAP, TITLE = 10, 14  # pixels
WHITE, BLACK = (255, 255, 255), (0, 0, 0)


@dataclass(frozen=True)
class PageFigure:
    """A picture that a part may have."""

    name: str  # the part's field that says where it goes
    shows: str
    drawn: Callable[[RunFolder], list[Path]]  # what a run has for it

    def path(self, paper: Path, part: Part) -> Path | None:
        """Where it lies, if the part has one."""
        file: str = getattr(part, self.name)
        return paper / "figures" / file if file else None


def add_to_figures(runs: Mapping[str, Run], paper: Path) -> None:
    """Put pictures of first seeds, by the identity of their run, into the figures of all rows that they are."""
    folders = {
        key: run.folder
        for key, run in runs.items()
        if run.config.seed == 0 and run.folder.status["state"] == "finished"
    }
    for part, figure in product(_parts(paper) if folders else (), FIGURES):
        if path := figure.path(paper, part):
            for place, row in enumerate(part.rows):
                if row.identity in folders and (panels := figure.drawn(folders[row.identity])):
                    _put(path, part.rows, place, panels)


def draw_latents(run: Run, identity: str, paper: Path, federation: Federation, device: str) -> None:
    """Where the first two latents of some held-out records lie, by class, if a figure asks for it."""
    if not any(part.latents and identity in (row.identity for row in part.rows) for part in _parts(paper)):
        return
    _, evaluation = run.evaluation(device=device, federation=federation)
    if not evaluation.autoencoders:
        return
    some = federation.test.take(torch.arange(min(SHOWN, len(federation.test))))
    places = evaluation.autoencoders[0].codes(some)[:, :2].double()
    low, high = (places.quantile(q, dim=0) for q in (0.01, 0.99))  # the middle 98 % of both
    shares = ((places - low) / (high - low).clamp_min(1e-9)).clamp(-1, 2)
    panel = Image.new("RGB", (PANEL, PANEL), WHITE)
    draw = ImageDraw.Draw(panel)
    for (x, y), label in zip((shares * (PANEL - 8) + 4).tolist(), some.y.tolist(), strict=True):
        draw.ellipse((x - 1.5, y - 1.5, x + 1.5, y + 1.5), fill=PALETTE[label % len(PALETTE)])
    _save(panel, run.folder.path / LATENTS)


def _parts(paper: Path) -> list[Part]:
    tables = (load_table(name) for name in table_names() if name.partition("/")[0] == paper.name)
    return [part for table in tables for part in table.parts]


FIGURES = (
    PageFigure("figure", "samples of each row", lambda run: sorted(run.samples_of(run.rounds_done).glob("*.png"))),
    PageFigure(
        "outliers",
        "of each row outliers, the closest outputs, and the typical records nearest to these",
        # Of the generator that is closest to them: a silo's own comes last by name.
        lambda run: sorted((run.path / "audit").glob("outliers-*.png"))[-1:],
    ),
    PageFigure("latents", "of each row the latents of test images, by class", lambda run: list(run.path.glob(LATENTS))),
)


def _put(path: Path, rows: Sequence[Row], place: int, grids: list[Path]) -> None:
    panels = [Image.open(grid).convert("RGB") for grid in grids]
    cell = sum(panel.width for panel in panels) + GAP, max(panel.height for panel in panels) + TITLE + GAP
    corners = _corners(len(rows), cell)
    sheet = Image.new("RGB", _size(len(rows), cell), WHITE)
    draw = ImageDraw.Draw(sheet)
    before = _pictures(path, rows, cell)
    for (left, top), row in zip(corners, rows, strict=True):
        draw.text((left + 2, top + 1), _cut(row.name, cell[0] - 4, draw), fill=BLACK)
        if row.identity in before:
            sheet.paste(before[row.identity], (left, top + TITLE))
    left, top = corners[place]
    draw.rectangle((left, top + TITLE, left + cell[0] - 1, top + cell[1] - 1), fill=WHITE)
    for panel in panels:
        sheet.paste(panel, (left, top + TITLE))
        left += panel.width
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    runs = PngInfo()
    runs.add_text(RUNS, json.dumps([row.identity for row in rows]))
    _save(sheet.convert("L" if _grey(sheet) else "RGB"), path, runs)


def _pictures(path: Path, rows: Sequence[Row], cell: tuple[int, int]) -> dict[str, Image.Image]:
    """What a sheet shows of each run: a table may have gained rows since, or have them in another order."""
    if not path.is_file():
        return {}
    with Image.open(path) as sheet:
        told = sheet.info.get(RUNS)
        runs = json.loads(told) if told else [row.identity for row in rows]  # sheets of old do not tell
        if sheet.size != _size(len(runs), cell):
            return {}
        boxes = [(left, top + TITLE, left + cell[0], top + cell[1]) for left, top in _corners(len(runs), cell)]
        return {run: sheet.crop(box).convert("RGB") for run, box in zip(runs, boxes, strict=True)}


def _corners(count: int, cell: tuple[int, int]) -> list[tuple[int, int]]:
    return [(place % ACROSS * cell[0], place // ACROSS * cell[1]) for place in range(count)]


def _size(count: int, cell: tuple[int, int]) -> tuple[int, int]:
    return min(ACROSS, count) * cell[0], -(-count // ACROSS) * cell[1]


def _cut(name: str, width: float, draw: ImageDraw.ImageDraw) -> str:
    """As much of a name as there is room for."""
    while draw.textlength(name) > width:
        name = name[:-1]
    return name


def _save(image: Image.Image, path: Path, told: PngInfo | None = None) -> None:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True, pnginfo=told)
    write_atomically(path, buffer.getvalue())


def _grey(image: Image.Image) -> bool:
    red, green, blue = image.split()
    return red.tobytes() == green.tobytes() == blue.tobytes()
