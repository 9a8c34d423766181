"""Rows that need no run: the bound of ALIGN-FL's theorem A.5 against the radius of the data (its Figure 6)."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

import fedloom
from fedloom.privacy.lipschitz import align_bound, latent_radius
from fedloom.reproduction.results import RunResult, result_path
from fedloom.reproduction.tables import Row, Table

ROUNDS, RELEASED, LATENT, DELTA = 10, 25_000, 2, 1e-5  # the paper's own setting
RADII = (0.01, 0.1, 1.0, 10.0, 28.0)  # the last is MNIST's


def write_bounds(table: Table, papers: Path) -> None:
    """The results of all rows without a preset."""
    for row in table.rows:
        if not row.preset:
            _bound(table, row).write(result_path(papers / table.paper, table.name, row.id, 0))


def _bound(table: Table, row: Row) -> RunResult:
    metrics: dict[str, float] = {}
    for radius in RADII:
        found = align_bound(row.lipschitz, radius, latent_radius(LATENT, DELTA), ROUNDS, RELEASED)
        metrics[f"bound/epsilon/radius-{radius:g}"] = found.epsilon
        metrics[f"bound/vacuous/radius-{radius:g}"] = float(found.vacuous)
    return RunResult(
        row=f"{table.name} {row.id}",
        preset="",
        overrides=[],
        config=row.identity,
        seed=0,
        state="finished",
        reason="",
        rounds=0,
        measured=["bound"],
        metrics=metrics,
        seconds={},
        device="CPU",
        engine="",
        versions={"fedloom": fedloom.__version__, "python": platform.python_version(), "torch": torch.__version__},
    )
