"""What a run took, as its folder tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from fedloom.errors import RunFolderError
from fedloom.experiment.run_loop import MEMORY
from fedloom.runs.checkpoint import checkpoint_rounds, folder_of
from fedloom.runs.folder import RunFolder


@dataclass(frozen=True)
class Measured:
    """Of the rounds that are done."""

    engine: str
    rounds: int
    seconds_per_round: float  # in the middle; metrics are among it where they were due
    steps_per_round: float
    bytes_up_per_round: float
    bytes_per_checkpoint: int  # on the disk
    memory: int  # bytes that were held at most; 0: the run has not ended, or an older version did not write it down


def measured(path: Path) -> Measured:
    """What a run in this folder has taken so far."""
    folder = RunFolder.open(path)
    rows, kept = folder.metrics(), checkpoint_rounds(path)
    if not rows or not kept:
        raise RunFolderError(f"{path} has no round that is done, so there is nothing to set beside its plan")
    return Measured(
        engine=folder.environment.get("engine", ""),
        rounds=len(rows),
        seconds_per_round=median(row["seconds"] for row in rows),
        steps_per_round=mean(row["steps"] for row in rows),
        bytes_up_per_round=sum(row["bytes"] for row in folder.egress()) / len(rows),
        bytes_per_checkpoint=sum(file.stat().st_size for file in folder_of(path, kept[-1]).glob("*.safetensors")),
        memory=folder.environment.get(MEMORY, 0),
    )
