"""A million rows of 40 columns: seconds and memory of each stage, from a Parquet file to as many synthetic rows.

    python benchmarks/large_tables.py [--rows 1000000]

Columns: a target of two levels, 19 of 3 to 14 levels, 10 of whole numbers and 10 of others in 16 bins; all follow one
hidden number. Pairs are counted in one pass over the rows. Memory is the most that the process has had by the end of a
stage, imports and all.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from common import keep, show
from fedloom import load_config, train
from fedloom.evaluation.table_marginals import marginal_distance
from fedloom.federation.records import Federation, Silo
from fedloom.federation.tables import load_tables
from fedloom.methods.pair_counts import PairCounts
from fedloom.modalities.table import schema_of

NAME = "large_tables-cpu"
COLUMNS = 40
T = TypeVar("T")
SETTINGS = ("privacy.trust=local", "evaluation.metrics=[]", "engine.name=reference", "engine.workers=1")


def make(folder: Path, rows: int) -> None:
    """Write the rows and their schema."""
    from pyarrow import parquet, table

    draw, lines, columns = np.random.default_rng(0), ['target = "c0"'], {}
    hidden = draw.standard_normal(rows)
    for number in range(COLUMNS):
        name, values = f"c{number}", hidden * draw.uniform(0.2, 0.8) + draw.standard_normal(rows)
        lines.append(f"[columns.{name}]")
        if number < 20:
            levels = np.array([f"level {level}" for level in range(3 + number % 12 if number else 2)])
            columns[name] = levels[np.clip((values + 2.5) / 5 * len(levels), 0, len(levels) - 1).astype(int)]
            lines += ['kind = "categorical"', f"levels = {levels.tolist()}"]
        elif number < 30:
            columns[name] = np.clip(values * 20 + 50, 0, 100).astype(int)
            lines += ['kind = "integer"', "bounds = [0, 100]"]
        else:
            columns[name] = np.clip(values, -4, 4)
            lines += ['kind = "continuous"', "bounds = [-4, 4]"]
    parquet.write_table(table(columns), folder / "rows.parquet")
    (folder / "schema.toml").write_text("\n".join(lines), encoding="utf-8")


class Stages:
    """What each stage took."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def __call__(self, name: str, work: Callable[[], T]) -> T:
        """Do it, and note its seconds and the memory so far."""
        wall, processor = time.perf_counter(), time.process_time()
        found = work()
        seconds = {"seconds": time.perf_counter() - wall, "processor": time.process_time() - processor}
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        self.rows.append({"stage": name, **seconds, "GB at most": memory})
        return found


def main() -> None:
    """All stages, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.make, options.rows)
        return
    stages = Stages()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        subprocess.run([sys.executable, __file__, "--rows", str(options.rows), "--make", folder], check=True)
        stages("nothing but imports", lambda: None)
        data = stages("read the file", lambda: load_tables(str(folder / "rows.parquet")))
        schema = schema_of(data.train.kind)
        pairs = PairCounts(schema, 4)
        stages("count all pairs", lambda: pairs.count(torch.nn.Identity(), data.train))
        federation = Federation("large", (Silo("a", data.train),), data.test, ("all",))
        config = load_config("tables/demo", SETTINGS)
        run = stages("count, add noise, fit", lambda: train(config, folder / "run", federation))
        made = stages("draw as many rows", lambda: run.generator().sample(len(data.train), group="all").numpy())
        distance = marginal_distance(schema, made, data.train.x.numpy(), 2)
    facts = {"table rows": len(data.train), "counts": int(np.prod(pairs.shape)), "pair distance": distance}
    show(f"{len(data.train):,} rows, {COLUMNS} columns, pair distance {distance:.4f}", stages.rows)
    keep(NAME, stages.rows, **facts)


if __name__ == "__main__":
    main()
