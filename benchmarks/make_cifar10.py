"""Turn mosaics ``train_<count>.jpg`` and ``test_<count>.jpg`` with ``<split>_<count>_labels.npy`` into an npz file.

python benchmarks/make_cifar10.py FOLDER --out cifar10.npz
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from make_charm import tiles, write

SPLITS = ("train", "test")


def arrays(folder: Path) -> dict[str, NDArray[np.generic]]:
    found: dict[str, NDArray[np.generic]] = {}
    for split in SPLITS:
        (labels,) = folder.glob(f"{split}_*_labels.npy")
        found[f"y_{split}"] = np.load(labels, allow_pickle=False)
        mosaic = folder / f"{labels.name.removesuffix('_labels.npy')}.jpg"
        found[f"x_{split}"] = tiles(mosaic, len(found[f"y_{split}"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn CIFAR-10 mosaics into an npz file that fedloom reads.")
    parser.add_argument("folder", type=Path, help="where mosaics and labels lie")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    given = parser.parse_args()
    write(given.out, arrays(given.folder))
    print(given.out)


if __name__ == "__main__":
    main()
