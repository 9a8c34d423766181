"""Make the embedded sample of Adult: 4,000 rows to train on and 1,000 held out, drawn at random by a fixed seed.

Usage: python scripts/make_adult_sample.py FILE, where FILE is adult.csv with a line of column names, as the UCI
repository's adult.data with its names. Prints the SHA-256 of every file written; fedloom/federation/sample/__init__.py
keeps them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import lzma
import sys
from pathlib import Path

import numpy as np

SAMPLE = Path(__file__).parents[1] / "src" / "fedloom" / "federation" / "sample"
ROWS = {"train": 4_000, "test": 1_000}
LEFT_OUT = ("fnlwgt", "education-num")  # a weight of the survey, and education once more


def main(path: Path) -> None:
    """Write both files."""
    names, *rows = csv.reader(io.StringIO(path.read_text(encoding="utf-8")), skipinitialspace=True)
    kept = [number for number, name in enumerate(names) if name not in LEFT_OUT]
    order, first = np.random.default_rng(0).permutation(len(rows)), 0
    for split, count in ROWS.items():
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([names[number] for number in kept])
        writer.writerows([rows[row][number] for number in kept] for row in sorted(order[first : first + count]))
        first += count
        content = lzma.compress(text.getvalue().encode(), preset=9 | lzma.PRESET_EXTREME)
        target = SAMPLE / f"adult-{split}.csv.xz"
        target.write_bytes(content)
        print(f'"{target.name}": "{hashlib.sha256(content).hexdigest()}",')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
