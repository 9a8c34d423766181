"""Pictures of runs, the rows of a part side by side; each run is put at its row's place when it has ended."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path

from PIL import Image, ImageDraw

from fedloom.experiment import Run
from fedloom.reproduction.tables import Part, load_table, table_names
from fedloom.runs.files import explained, write_atomically
from fedloom.runs.folder import RunFolder

ACROSS = 3  # rows of a table beside each other
GAP, TITLE = 10, 14  # pixels
WHITE, BLACK = (255, 255, 255), (0, 0, 0)


def figure_path(paper: Path, part: Part) -> Path:
    """Where a part's picture lies."""
    return paper / "figures" / part.figure


def add_to_figures(runs: Mapping[str, Run], paper: Path) -> None:
    """Put pictures of first seeds, by the identity of their run, into the figures of all rows that they are."""
    drawn = {
        key: {shows: found(run.folder) for shows, found in DRAWN.items()}
        for key, run in runs.items()
        if run.config.seed == 0 and run.folder.status["state"] == "finished"
    }
    tables = [load_table(name) for name in table_names() if drawn and name.partition("/")[0] == paper.name]
    for part in (part for table in tables for part in table.parts if part.figure):
        for place, row in enumerate(part.rows):
            if found := drawn.get(row.identity, {}).get(part.shows):
                _put(figure_path(paper, part), [row.name for row in part.rows], place, found)


def _samples(folder: RunFolder) -> list[Path]:
    return sorted(folder.samples_of(folder.rounds_done).glob("*.png"))


def _outliers(folder: RunFolder) -> list[Path]:
    """Of the generator that is closest to them: a silo's own comes last by name."""
    return sorted((folder.path / "audit").glob("outliers-*.png"))[-1:]


DRAWN: dict[str, Callable[[RunFolder], list[Path]]] = {"samples": _samples, "outliers": _outliers}


def _put(path: Path, names: list[str], place: int, grids: list[Path]) -> None:
    panels = [Image.open(grid).convert("RGB") for grid in grids]
    width = sum(panel.width for panel in panels) + GAP
    height = max(panel.height for panel in panels) + TITLE + GAP
    lines = -(-len(names) // ACROSS)
    size = min(ACROSS, len(names)) * width, lines * height
    sheet = Image.new("RGB", size, WHITE)
    draw = ImageDraw.Draw(sheet)
    corners = [(column * width, line * height) for line in range(lines) for column in range(ACROSS)]
    for (left, top), name in zip(corners, names, strict=False):
        draw.text((left + 2, top + 1), name, fill=BLACK)
    if path.is_file():
        with Image.open(path) as before:
            if before.size == size:
                sheet.paste(before)
    left, top = corners[place]
    draw.rectangle((left, top + TITLE, left + width - 1, top + height - 1), fill=WHITE)
    for panel in panels:
        sheet.paste(panel, (left, top + TITLE))
        left += panel.width
    buffer = io.BytesIO()
    sheet.convert("L" if _grey(sheet) else "RGB").save(buffer, format="PNG", optimize=True)
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def _grey(image: Image.Image) -> bool:
    red, green, blue = image.split()
    return red.tobytes() == green.tobytes() == blue.tobytes()
