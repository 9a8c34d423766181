"""Where values are missing: the share of empty cells of each column that has some, in records and in synthetic rows.

    python papers/tables/missing.py data/randhie/randhie.csv randhie-made/data/train.csv child

With a third column the shares stand for each of its levels: whether what is missing still depends on it.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path


def shares(path: str, by: str) -> dict[tuple[str, str], float]:
    """Of each column and each level of ``by`` the share of its cells that are empty."""
    cells: dict[tuple[str, str], list[bool]] = defaultdict(list)
    with Path(path).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for name, cell in row.items():
                cells[name, row.get(by, "")].append(not cell)
    return {key: sum(found) / len(found) for key, found in cells.items()}


if __name__ == "__main__":
    real, made = (shares(path, sys.argv[3] if len(sys.argv) > 3 else "") for path in sys.argv[1:3])
    for name, level in sorted(key for key in made if real.get(key, 0) or made[key]):
        print(f"{name:12} {level:6} records {real.get((name, level), 0):6.1%}   rows {made[name, level]:6.1%}")
