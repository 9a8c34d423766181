"""What a silo keeps of a run on its own disk: after each round its state and its update, whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedloom.engines.base import SiloState
from fedloom.engines.remote.frames import Frame
from fedloom.errors import RunFolderError
from fedloom.runs.files import explained, remove_folder, remove_unfinished, write_folder_atomically
from fedloom.sharing.codec import packed, unpacked

COPIES = 4  # of a model that a round may write: the update, and a state of weights and two moments
SPARE = 64 * 2**20  # bytes of disk beyond what a round writes


@dataclass(frozen=True)
class KeptRound:
    """What is known of a round that is kept."""

    task: str  # digest of the task that it answers
    experiment: str  # digest of the run's experiment
    metrics: dict[str, Any]  # its lines in the silo's own report
    egress: dict[str, Any]


@dataclass(frozen=True)
class RoundStore:
    """The rounds of one run that the server may still come back to."""

    path: Path

    def rounds(self) -> list[int]:
        """Those that are kept, oldest first."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"round-(\d+)", name)))

    def state_before(self, round: int) -> SiloState:
        """What the silo had kept when a round began; empty before its first."""
        earlier = [kept for kept in self.rounds() if kept < round]
        if not earlier:
            return SiloState()
        return SiloState(unpacked((self._folder(earlier[-1]) / "state.safetensors").read_bytes(), "state"))

    def entry(self, round: int) -> KeptRound:
        """What is known of a round that is kept."""
        return KeptRound(**json.loads((self._folder(round) / "index.json").read_text(encoding="utf-8")))

    def update(self, round: int, task: str) -> Frame | None:
        """The update that was made for exactly this task, if it is still here: the very same bytes."""
        if round not in self.rounds() or self.entry(round).task != task:
            return None
        return Frame.of_bytes((self._folder(round) / "update.frame").read_bytes())

    def put(self, round: int, entry: KeptRound, state: SiloState, update: Frame) -> None:
        """Keep a round; what lies here of later ones belongs to a past that the server has left."""
        files: dict[str, bytes | list[bytes]] = {
            "state.safetensors": packed(state.tensors),
            "update.frame": update.pieces(),
            "index.json": json.dumps(asdict(entry)).encode(),
        }
        write_folder_atomically(self._folder(round), files)
        for later in (kept for kept in self.rounds() if kept > round):
            remove_folder(self._folder(later))

    def clear(self, settled: int) -> None:
        """Drop what the server will never ask for again: all but the newest round up to ``settled``."""
        for old in [kept for kept in self.rounds() if kept <= settled][:-1]:
            remove_folder(self._folder(old))
        remove_unfinished(self.path)

    def require_space(self, model: int) -> None:
        """Complain before anything is charged or trained if a round's files might not fit; ``model`` is in bytes."""
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free
        needed = COPIES * model + SPARE
        if free < needed:
            raise RunFolderError(
                f"no space is left on the disk of the silo: {free} bytes are free, {needed} are needed"
            )

    def _folder(self, round: int) -> Path:
        return self.path / f"round-{round:04d}"
