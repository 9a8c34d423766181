"""What a silo keeps of its rounds, whenever it is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedloom.engines.base import SiloState
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.round_store import KeptRound, RoundStore
from fedloom.runs import files


def kept(store: RoundStore, round: int) -> None:
    entry = KeptRound(f"task-{round}", "experiment", {}, {})
    store.put(round, entry, SiloState({"w": torch.tensor([round])}), Frame({"round": round}))


def test_a_round_that_is_dropped_is_dropped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle of removing files leaves whole rounds alone, and what it left is cleared the next time."""
    store = RoundStore(tmp_path)
    for round in (1, 2, 3):
        kept(store, round)

    def killed(folder: Path, ignore_errors: bool = False) -> None:
        if folder.exists():
            next(folder.iterdir()).unlink()
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", killed)
        with pytest.raises(SystemExit):
            store.clear(3)
    assert store.rounds() == [2, 3]
    assert [store.entry(round).task for round in store.rounds()] == ["task-2", "task-3"]
    store.clear(3)
    assert [path.name for path in tmp_path.iterdir()] == ["round-0003"]
