from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.engines.base import SiloState
from fedloom.errors import RunFolderError
from fedloom.runs import stacks
from fedloom.runs.checkpoint import Checkpoint, folder_of, load_checkpoint, save_checkpoint
from fedloom.runs.stacks import Overflow, StoredRow
from support import equal_bits, names_in

NUMBERS = 25  # of float32 in a state, beside a count of steps: 104 bytes


def tensors(number: float, width: int = NUMBERS) -> dict[str, Tensor]:
    return {"model/w": torch.full((width,), number), "optimizer/step": torch.tensor(number)}


def in_memory(states: list[SiloState]) -> int:
    return sum(104 for state in states if not isinstance(state.source, StoredRow))


def test_below_the_bound_nothing_is_written(tmp_path: Path) -> None:
    overflow = Overflow(tmp_path / "overflow", limit=3 * 104)
    states = [SiloState(tensors(float(i))) for i in range(3)]
    for state in states:
        overflow.admit(state)
    assert in_memory(states) == 3 * 104
    assert not (tmp_path / "overflow").exists()


@pytest.mark.parametrize("silos", [200, 2000])
def test_memory_is_bounded_however_many_silos_there_are(
    silos: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds in which everybody takes part; files are few, and gone when nobody needs them."""
    monkeypatch.setattr(stacks, "FILE_BYTES", 100 * 104)
    overflow, kept, most = Overflow(tmp_path / "overflow", limit=150 * 104), {}, 0
    for round_number in range(3):
        fresh = {}
        for silo in range(silos):
            fresh[silo] = SiloState(tensors(silo + 0.25 * round_number))
            overflow.admit(fresh[silo])
            if silo % 50 == 49:
                most = max(most, in_memory([*kept.values(), *fresh.values()]))
        kept = fresh
    assert 0 < most <= 150 * 104
    # Each overflow of 151 states goes to files of 100 and of 51; those of earlier rounds have no owner any more.
    assert len(names_in(tmp_path / "overflow")) <= 2 * (silos // 151 + 1)
    assert all(equal_bits(kept[silo].tensors, tensors(silo + 0.5)) for silo in range(silos))
    kept.clear()
    del fresh
    assert names_in(tmp_path / "overflow") == []
    overflow.close()
    assert not (tmp_path / "overflow").exists()


def test_states_of_different_make_go_to_files_of_their_own(tmp_path: Path) -> None:
    overflow = Overflow(tmp_path / "overflow", limit=3 * 104)
    states = [SiloState(tensors(float(i), width)) for i, width in enumerate((NUMBERS, 30, NUMBERS, 30))]
    for state in states:
        overflow.admit(state)
    assert names_in(tmp_path / "overflow") == ["silos-1.safetensors", "silos-2.safetensors"]
    assert [len(state.tensors["model/w"]) for state in states] == [NUMBERS, 30, NUMBERS, 30]
    assert states[3].tensors["optimizer/step"].shape == ()


def test_a_silo_without_anything_to_keep_is_no_row(tmp_path: Path) -> None:
    overflow, nothing = Overflow(tmp_path / "overflow", limit=50), SiloState()
    overflow.admit(nothing)
    overflow.admit(SiloState(tensors(1.0)))
    assert not nothing
    assert nothing.tensors == {}


def test_a_file_that_went_is_named(tmp_path: Path) -> None:
    overflow, state = Overflow(tmp_path / "overflow", limit=50), SiloState(tensors(1.0))
    overflow.admit(state)
    assert state
    assert sorted(state.source) == ["model/w", "optimizer/step"]
    with pytest.raises(KeyError, match="model/v"):
        state.source["model/v"]
    overflow.close()
    with pytest.raises(RunFolderError, match=r"silos-1\.safetensors is gone or damaged"):
        state.source["model/w"]


def test_a_checkpoint_shares_the_files_and_outlives_them(tmp_path: Path) -> None:
    """Of three silos in one file the second has moved on, and is in memory; the checkpoint has its newer tensors."""
    overflow = Overflow(tmp_path / "overflow", limit=2 * 104)
    states = {name: SiloState(tensors(float(i))) for i, name in enumerate(("north", "east", "south"))}
    for state in states.values():
        overflow.admit(state)
    states["east"] = SiloState(tensors(7.0))
    overflow.admit(states["east"])
    saved = Checkpoint(1, {}, {name: state.source for name, state in states.items()}, {})
    save_checkpoint(tmp_path, saved, keep=1)
    names = ["index.json", "server.safetensors", "silos-0.safetensors", "silos-1.safetensors"]
    assert names_in(folder_of(tmp_path, 1)) == names
    shared = folder_of(tmp_path, 1) / "silos-1.safetensors"
    assert shared.samefile(tmp_path / "overflow" / "silos-1.safetensors")
    states.clear()
    overflow.close()
    found = load_checkpoint(tmp_path).silos
    assert {name: float(table["optimizer/step"]) for name, table in found.items()} == {
        "east": 7.0,
        "north": 0.0,
        "south": 2.0,
    }
    again = Overflow(tmp_path / "overflow", limit=10**6)
    resumed = SiloState(found["south"])
    again.admit(resumed)
    assert not isinstance(resumed.source, StoredRow)  # the checkpoint may be deleted now
    assert equal_bits(resumed.tensors, tensors(2.0))


def test_where_files_cannot_be_shared_they_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    overflow, state = Overflow(tmp_path / "overflow", limit=50), SiloState(tensors(3.0))
    overflow.admit(state)
    save_checkpoint(tmp_path, Checkpoint(1, {}, {"north": state.source}, {}), keep=1)
    overflow.close()
    assert equal_bits(load_checkpoint(tmp_path).silos["north"], tensors(3.0))
