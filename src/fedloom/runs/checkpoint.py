"""Checkpoints: index.json, one safetensors file for the server, one for each stack of silos with equal tensors."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedloom.errors import RunFolderError
from fedloom.runs.files import digest, write_folder_atomically

SCHEMA = 1
BLOCKS, MEMORY = "blocks/", "memory/"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A federation's state as named tensors, and what the index says about it."""

    round: int
    server: Tensors
    silos: dict[str, Tensors]  # by silo name; silos that keep nothing are absent
    facts: dict[str, Any]  # config digest, seed, participants, setting: whatever the run wants to find again


def folder_of(run: Path, round_number: int) -> Path:
    """Where the checkpoint of a round lies."""
    return run / "checkpoints" / f"round-{round_number:04d}"


def save_checkpoint(run: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Write it whole or not at all, then drop all but the newest ``keep``."""
    files = {"server.safetensors": save(_contiguous(checkpoint.server))}
    stacks: dict[str, dict[str, Any]] = {}
    for number, names in enumerate(_stacks(checkpoint.silos)):
        first = checkpoint.silos[names[0]]
        stacked = {key: torch.stack([checkpoint.silos[name][key] for name in names]) for key in first}
        files[f"silos-{number}.safetensors"] = save(_contiguous(stacked))
        stacks[f"silos-{number}.safetensors"] = {"silos": names}
    index = {
        "schema": SCHEMA,
        "round": checkpoint.round,
        **checkpoint.facts,
        "stacks": stacks,
        "sha256": {name: digest(data) for name, data in files.items()},
    }
    files["index.json"] = json.dumps(index, indent=2).encode()
    write_folder_atomically(folder_of(run, checkpoint.round), files)
    for old in checkpoint_rounds(run)[:-keep]:
        shutil.rmtree(folder_of(run, old), ignore_errors=True)


def checkpoint_rounds(run: Path) -> list[int]:
    """The rounds that have a checkpoint, oldest first."""
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"round-(\d+)", name)))


def load_checkpoint(run: Path, round_number: int | None = None) -> Checkpoint:
    """Read the checkpoint of a round, by default the newest; every file is verified."""
    rounds = checkpoint_rounds(run)
    if not rounds:
        raise RunFolderError(f"{run} holds no checkpoint, so there is nothing to load")
    if round_number is not None and round_number not in rounds:
        raise RunFolderError(f"{run} has no checkpoint of round {round_number} (there: {', '.join(map(str, rounds))})")
    folder = folder_of(run, rounds[-1] if round_number is None else round_number)
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        if index["schema"] != SCHEMA:
            raise RunFolderError(f"{folder} has checkpoint schema {index['schema']}; this version reads {SCHEMA}")
        contents = {name: _verified(folder / name, checksum) for name, checksum in index["sha256"].items()}
        silos: dict[str, Tensors] = {}
        for name, stack in index["stacks"].items():
            for position, silo in enumerate(stack["silos"]):
                silos[silo] = {key: tensor[position].clone() for key, tensor in contents[name].items()}
        known = {"schema", "round", "stacks", "sha256"}
        facts = {key: value for key, value in index.items() if key not in known}
        return Checkpoint(index["round"], contents["server.safetensors"], silos, facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise RunFolderError(
            f"{folder} is damaged ({error}); remove it to go on from the checkpoint before it"
        ) from error


def _verified(path: Path, checksum: str) -> Tensors:
    data = path.read_bytes()
    if digest(data) != checksum:
        raise ValueError(f"{path.name} does not match its checksum")
    return load(data)


def _stacks(silos: dict[str, Tensors]) -> list[list[str]]:
    """Silos whose tensors have equal names, shapes and dtypes go together, in the order given."""
    stacks: dict[tuple[tuple[str, torch.Size, torch.dtype], ...], list[str]] = {}
    for name, tensors in silos.items():
        signature = tuple((key, tensors[key].shape, tensors[key].dtype) for key in sorted(tensors))
        stacks.setdefault(signature, []).append(name)
    return list(stacks.values())


def _contiguous(tensors: Tensors) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
