"""Pictures of a page: small, re-encoded (nothing of a foreign file is passed on), and within a budget."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor

from fedloom.runs.images import grid_of

WIDEST = 560  # pixels; a wider grid is scaled down
MOST_PIXELS = 40_000_000  # a larger file is no sample grid
MOST_ROUNDS = 24  # on the slider
ROUND = re.compile(r"round-(\d{1,9})")
BROKEN_IMAGE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)

Films = dict[str, dict[int, str]]  # group -> round -> picture


def encoded(image: Image.Image) -> tuple[str, bytes]:
    """Grey pictures as PNG, coloured ones as JPEG, the smaller of the two each time: media type and content."""
    if image.width > WIDEST:
        image = image.resize((WIDEST, max(1, round(image.height * WIDEST / image.width))), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    if image.mode in ("1", "L"):
        kind = "png"
        image.convert("L").save(buffer, format="PNG", optimize=True)
    else:
        kind = "jpeg"
        image.convert("RGB").save(buffer, format="JPEG", quality=88, subsampling=0)
    return f"image/{kind}", buffer.getvalue()


def data_uri(image: Image.Image) -> str:
    """A picture as an address that holds it."""
    return _address(*encoded(image))


def grid(x: Tensor, columns: int = 0, kind: str = "") -> str:
    """A grid of records of a kind as a picture."""
    return data_uri(grid_of(x, columns, kind=kind))


@dataclass(frozen=True)
class Samples:
    """The sample grids that a run left, and those files that are no pictures."""

    films: Films
    broken: tuple[str, ...]


def grids_of(run: Path) -> dict[int, list[Path]]:
    """The files of sample grids by round, sorted."""
    return {number: _pictures_in(folder) for number, folder in sorted(sample_folders(run).items())}


def sample_folders(run: Path) -> dict[int, Path]:
    """Where the sample grids of each round lie."""
    return {
        int(match[1]): run / "samples" / name
        for name, is_folder in sorted(_names_in(run / "samples"))
        if is_folder and (match := ROUND.fullmatch(name))
    }


def _pictures_in(folder: Path) -> list[Path]:
    return [folder / name for name, _ in sorted(_names_in(folder)) if name.endswith(".png")]


def _names_in(folder: Path) -> list[tuple[str, bool]]:
    """What lies in a folder, and whether it is one itself."""
    try:
        with os.scandir(folder) as items:
            return [(item.name, item.is_dir()) for item in items]
    except (FileNotFoundError, NotADirectoryError):
        return []


def newest_picture(run: Path) -> tuple[int, Path] | None:
    """The first grid of the newest round that has any."""
    for number, folder in sorted(sample_folders(run).items(), reverse=True):
        if found := _pictures_in(folder):
            return number, found[0]
    return None


def sample_files(run: Path, groups: tuple[str, ...]) -> dict[str, dict[int, Path]]:
    """The files of sample grids by group and round, of at most ``MOST_ROUNDS`` rounds."""
    found: dict[str, dict[int, Path]] = {}
    names, grids = {_letters(group): group for group in groups}, grids_of(run)
    for number in thinned(list(grids), MOST_ROUNDS):
        for file in grids[number]:
            found.setdefault(names.get(_letters(file.stem), file.stem), {})[number] = file
    order = sorted(found, key=lambda group: (groups.index(group) if group in groups else len(groups), group))
    return {group: found[group] for group in order}


def samples_of(run: Path, groups: tuple[str, ...], budget: int) -> Samples:
    """Sample grids by group and round; rounds are thinned out evenly until all fit the budget in bytes."""
    broken, films = [], {}
    for group, files in sample_files(run, groups).items():
        film = {}
        for number, file in files.items():
            try:
                film[number] = picture_of(file)
            except BROKEN_IMAGE:
                broken.append(f"samples/{file.parent.name}/{file.name}")
        films[group] = film
    rounds = sorted({number for film in films.values() for number in film})
    while len(rounds) > 1 and _size(films) > budget:
        rounds = thinned(rounds, len(rounds) // 2)
        films = {group: {r: uri for r, uri in film.items() if r in rounds} for group, film in films.items()}
    return Samples({group: film for group, film in films.items() if film}, tuple(broken))


def thinned(rounds: list[int], most: int) -> list[int]:
    """At most so many, evenly spread; the last always stays, and the first where there is room."""
    if len(rounds) <= most:
        return rounds
    if most <= 1:
        return rounds[-1:]
    return [rounds[round(index * (len(rounds) - 1) / (most - 1))] for index in range(most)]


def _letters(name: str) -> str:
    """What a group's name and the file name made of it have in common."""
    return re.sub(r"[\W_]", "_", name)


def picture_of(file: Path) -> str:
    """A PNG file as a picture."""
    return _address(*encoded_file(file))


def encoded_file(file: Path) -> tuple[str, bytes]:
    """A PNG file, encoded anew; raises one of ``BROKEN_IMAGE`` where it is none."""
    with Image.open(file, formats=("PNG",)) as image:
        if image.width * image.height > MOST_PIXELS:
            raise ValueError("too many pixels")
        return encoded(image)


def _address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _size(films: Mapping[str, Mapping[int, str]]) -> int:
    return sum(len(uri) for film in films.values() for uri in film.values())
