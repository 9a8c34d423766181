"""Make the embedded sample: the first 600 training and 100 test images of every class, in original order.

Usage: python scripts/make_sample.py FOLDER, where FOLDER holds mnist/ and fashion_mnist/ with the four IDX
.gz files each. Prints the SHA-256 of every file written; fedloom/federation/sample/__init__.py keeps them.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import sys
from pathlib import Path

import numpy as np

from fedloom.federation import idx

SAMPLE = Path(__file__).parents[1] / "src" / "fedloom" / "federation" / "sample"
FOLDERS = {"mnist": "mnist", "fashion-mnist": "fashion_mnist"}
SPLITS = {"train": ("train", 600), "test": ("t10k", 100)}
RECORDS_PER_PART = 3000  # keeps every file small enough for code hosts that dislike large ones


def first_of_each_class(labels: np.ndarray, count: int) -> np.ndarray:
    """The positions of the first ``count`` records of every class, in their original order."""
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c in np.unique(labels)]))


def read(folder: Path, stem: str) -> np.ndarray:
    """One IDX file that lies compressed in ``folder``."""
    return idx.decode(gzip.decompress((folder / f"{stem}.gz").read_bytes()), stem)


def main(folder: Path) -> None:
    """Write the sample files of both sets."""
    for name, source in FOLDERS.items():
        for split, (prefix, per_class) in SPLITS.items():
            images = read(folder / source, f"{prefix}-images-idx3-ubyte")
            labels = read(folder / source, f"{prefix}-labels-idx1-ubyte")
            kept = first_of_each_class(labels, per_class)
            for part, start in enumerate(range(0, len(kept), RECORDS_PER_PART)):
                rows = kept[start : start + RECORDS_PER_PART]
                for kind, array in (("images", images), ("labels", labels)):
                    content = lzma.compress(idx.encode(array[rows]), preset=9 | lzma.PRESET_EXTREME)
                    target = SAMPLE / f"{name}-{split}-{kind}-{part}.idx.xz"
                    target.write_bytes(content)
                    print(f'"{target.name}": "{hashlib.sha256(content).hexdigest()}",')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
