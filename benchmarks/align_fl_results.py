"""What ``benchmarks/align_fl.py`` measured, as result files of ``fedloom reproduce``: rows of tables, unchanged, alone.

    python benchmarks/align_fl_results.py benchmarks/results/align_fl-cuda.json noise.json papers
    fedloom reproduce align-fl/table2 align-fl/table3 align-fl/fig5 --render

The private rows had the noise that their most demanding silo needs at every silo (``noise.json``, from ``--plan``), so
each silo spent at most the row's epsilon. That is another run than a noise for every silo: it has rows of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fedloom
from fedloom.config import Config, load_config
from fedloom.reproduction.results import Result, evaluation_of, result_path
from fedloom.reproduction.tables import Row, Table, identity, load_table, table_names

NAMES = {
    "probe": "probe",
    "frechet": "frechet",
    "spread": "spread",
    "manifold": "precision",
}  # metric -> one of its keys


def seconds_of(found: dict[str, Any]) -> dict[str, float]:
    """A run's share of training, and its own measuring."""
    spent = found["seconds"]
    measuring = spent["evaluation"] if "evaluation" in spent else spent["all"] - spent["ready"] - spent["training"]
    return {"training": spent["training"] / spent.get("runs", 1), "measuring": measuring}


def changes_of(noise: float | None) -> list[str]:
    """What a private row had otherwise than its preset says."""
    return [] if noise is None else ["privacy.epsilon=0", f"privacy.noise_multiplier={noise}"]


def result(found: dict[str, Any], table: Table, row: Row, machine: dict[str, Any], config: Config) -> Result:
    """A row of the benchmark as a result of a table's row."""
    kinds = {key.partition("/")[0] for key in found["metrics"]}
    papers_own = any(key.startswith("frechet/paper-") for key in found["metrics"])
    return Result(
        row=f"{table.name} {row.id}",
        preset=row.preset,
        overrides=list(row.overrides),
        config=row.identity,
        seed=found["seed"],
        state="finished",
        reason="",
        rounds=len(found["losses"]),
        measured=[name for name, kind in NAMES.items() if kind in kinds] + ["frechet-paper"] * papers_own,
        metrics=found["metrics"],
        seconds=seconds_of(found),
        device=machine["gpu"],
        engine=found["engine"],
        versions={"fedloom": fedloom.__version__, "python": machine["python"], "torch": machine["torch"]},
        evaluation=evaluation_of(config.evaluation),
        measured_on=machine["gpu"],
        precision=config.engine.precision,
    )


def main(stored: Path, planned: Path, papers: Path) -> None:
    """Write a file for each run that is a row of a table; of several tables the last one keeps it."""
    benchmark = json.loads(stored.read_text(encoding="utf-8"))
    noise = json.loads(planned.read_text(encoding="utf-8"))
    rows: dict[str, tuple[Table, Row]] = {}
    for table in (load_table(name) for name in table_names() if name.startswith("align-fl/")):
        rows |= {row.identity: (table, row) for row in table.rows if row.preset}
    for found in benchmark["rows"]:
        if " " in found["row"] or "error" in found:  # with changes, or without a result
            continue
        config = load_config(f"align-fl/{found['row']}", changes_of(noise.get(found["row"])))
        if identity(config) in rows:
            table, row = rows[identity(config)]
            path = result_path(papers / table.paper, table.name, row.id, found["seed"])
            result(found, table, row, benchmark["machine"], config).write(path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
