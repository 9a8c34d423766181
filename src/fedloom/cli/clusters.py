"""What ``fedloom sweep`` and ``fedloom reproduce`` are told about jobs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cluster import Cluster
from fedloom.errors import ConfigError


class Where(StrEnum):
    """Where jobs go."""

    SLURM = "slurm"
    LOCAL = "local"


On = Annotated[
    Where | None,
    typer.Option("--on", help="Packs as jobs: of a SLURM cluster, or here.", show_default=False),
]
Jobs = Annotated[int, typer.Option("--jobs", min=0, help="Jobs at the same time; 0: all, here one for each core.")]
Sbatch = Annotated[
    list[str] | None,
    typer.Option(
        "--sbatch",
        metavar="KEY=VALUE",
        help="For sbatch, such as gpus=1; may be repeated.",
        show_default=False,
    ),
]


def cluster_of(
    where: Where | None, out: Path, jobs: int, sbatch: Sequence[str], *, alone: bool = False
) -> Cluster | None:
    """Where jobs go, if they are asked for; ``alone`` where something was said of this process."""
    if where is not None and alone:
        raise ConfigError("--workers and --minutes are for this process; jobs have --jobs, and --sbatch time=MINUTES")
    options = dict[str, str]()
    for option in sbatch:
        key, equals, value = option.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"--sbatch {option} must be KEY=VALUE, such as partition=gpu")
        options[key.lstrip("-")] = value
    if where is None and (jobs or options):
        raise ConfigError("--jobs and --sbatch are for jobs; say --on slurm or --on local")
    if where is Where.LOCAL and options:
        raise ConfigError("--sbatch is for --on slurm, and --on local is asked for")
    return Cluster(where.value, (out / "jobs").resolve(), jobs, options) if where else None
