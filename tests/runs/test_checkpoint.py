from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.errors import RunFolderError
from fedloom.runs.checkpoint import Checkpoint, checkpoint_rounds, folder_of, load_checkpoint, save_checkpoint
from support import equal_bits, names_in


def checkpoint(number: int) -> Checkpoint:
    def moments(scale: float) -> dict[str, Tensor]:
        return {"model/w": scale * torch.randn(3, 2), "optimizer/vae/w/step": torch.tensor(scale)}

    torch.manual_seed(number)
    server = {"blocks/encoder@all/w": torch.randn(4, 2).T, "memory/count": torch.tensor([number])}
    silos = {"north": moments(1.0), "east": {"model/w": torch.randn(5)}, "south": moments(2.0)}
    return Checkpoint(number, server, silos, {"config": "digest", "participants": [0, 2]})


def test_what_is_loaded_is_what_was_saved_to_the_bit(tmp_path: Path) -> None:
    saved = checkpoint(7)
    save_checkpoint(tmp_path, saved, keep=1)
    loaded = load_checkpoint(tmp_path)
    assert (loaded.round, loaded.facts) == (7, saved.facts)
    assert equal_bits(loaded.server, saved.server)
    assert loaded.silos.keys() == saved.silos.keys()
    assert all(equal_bits(loaded.silos[name], saved.silos[name]) for name in saved.silos)


def test_silos_with_equal_tensors_share_a_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=1)
    names = ["index.json", "server.safetensors", "silos-0.safetensors", "silos-1.safetensors"]
    assert names_in(folder_of(tmp_path, 1)) == names
    index = json.loads((folder_of(tmp_path, 1) / "index.json").read_text())
    assert index["stacks"]["silos-0.safetensors"]["silos"] == ["north", "south"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for number in (9, 10, 11, 10000):
        save_checkpoint(tmp_path, checkpoint(number), keep=2)
    assert checkpoint_rounds(tmp_path) == [11, 10000]
    assert load_checkpoint(tmp_path).round == 10000
    assert load_checkpoint(tmp_path, 11).round == 11
    with pytest.raises(RunFolderError, match=r"no checkpoint of round 9 \(there: 11, 10000\)"):
        load_checkpoint(tmp_path, 9)


def test_a_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    assert checkpoint_rounds(tmp_path) == []
    with pytest.raises(RunFolderError, match="holds no checkpoint"):
        load_checkpoint(tmp_path)


def test_what_a_kill_left_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(1), keep=2)
    (tmp_path / "checkpoints" / ".round-0002.99.tmp").mkdir()
    assert checkpoint_rounds(tmp_path) == [1]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("server.safetensors", flip_a_bit),
        ("silos-1.safetensors", flip_a_bit),
        ("server.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ("silos-0.safetensors", Path.unlink),
        ("index.json", Path.unlink),
        ("index.json", lambda path: path.write_text("{")),
        ("index.json", lambda path: path.write_text("[]")),
        ("index.json", lambda path: path.write_text('{"schema": 1}')),
    ],
)
def test_damage_is_found_and_named(name: str, damage: object, tmp_path: Path) -> None:
    assert callable(damage)
    save_checkpoint(tmp_path, checkpoint(3), keep=1)
    damage(folder_of(tmp_path, 3) / name)
    with pytest.raises(RunFolderError, match=r"round-0003 is damaged .*go on from the checkpoint before it"):
        load_checkpoint(tmp_path)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(3), keep=1)
    index = folder_of(tmp_path, 3) / "index.json"
    index.write_text(index.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(RunFolderError, match="has checkpoint schema 2; this version reads 1"):
        load_checkpoint(tmp_path)
