"""Turn mosaics of 32x32 images, 100 tiles a row, ``<domain>_<split>_<count>.jpg``, into the npz file of CHARM.

python benchmarks/make_charm.py FOLDER [--out charm.npz]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedloom.errors import DataError
from fedloom.federation.archives import cache_folder
from fedloom.federation.charm import FILE, GROUPS

TILE, TILES_A_ROW = 32, 100
SPLITS = ("train", "test")


def tiles(file: Path, count: int) -> NDArray[np.uint8]:
    """The first ``count`` tiles of a mosaic, row by row, as (count, 32, 32, 3)."""
    try:
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"cannot read {file} as an image: {error}") from error
    height, width, _ = pixels.shape
    rows = height // TILE
    if width != TILE * TILES_A_ROW or height % TILE or not 0 < count <= rows * TILES_A_ROW:
        raise DataError(f"{file} is {width}x{height} pixels: no mosaic of {count} tiles, {TILES_A_ROW} a row")
    grid = pixels.reshape(rows, TILE, TILES_A_ROW, TILE, 3).swapaxes(1, 2)
    return grid.reshape(-1, TILE, TILE, 3)[:count]


def mosaic(folder: Path, domain: str, split: str) -> NDArray[np.uint8]:
    """The images of a domain's split; the file's name says how many there are."""
    found = sorted(folder.glob(f"{domain}_{split}_*.jpg"))
    counts = [file.stem.rpartition("_")[2] for file in found]
    if len(found) != 1 or not counts[0].isdecimal():
        raise DataError(f"{folder} must hold one file {domain}_{split}_<count>.jpg; it holds {len(found)} such files")
    return tiles(found[0], int(counts[0]))


def arrays(folder: Path) -> dict[str, NDArray[np.generic]]:
    """All domains under the names that an npz source has."""
    found: dict[str, NDArray[np.generic]] = {}
    for split in SPLITS:
        images = [mosaic(folder, domain, split) for domain in GROUPS]
        found[f"x_{split}"] = np.concatenate(images)
        found[f"group_{split}"] = np.repeat(GROUPS, [len(part) for part in images])
    return found


def write(out: Path, named: dict[str, NDArray[np.generic]]) -> None:
    """Either the old file or the whole new one is there, never a part."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            np.savez(stream, **named)  # type: ignore[arg-type]
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Turn CHARM mosaics into the npz file that fedloom reads.")
    parser.add_argument("folder", type=Path, help="where the mosaics lie")
    parser.add_argument(
        "--out", type=Path, default=cache_folder() / FILE, help="the file to write (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    try:
        named = arrays(given.folder)
        write(given.out, named)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cannot write {given.out}: {error.strerror}", file=sys.stderr)
        return 2
    for split in SPLITS:
        groups, counts = np.unique(named[f"group_{split}"], return_counts=True)
        print(split, ", ".join(f"{group} {count:,}" for group, count in zip(groups, counts, strict=True)))
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
