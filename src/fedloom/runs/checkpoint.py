"""Checkpoints: index.json, one safetensors file for the server, one for each stack of silos with equal tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedloom.errors import RunFolderError
from fedloom.outline import in_outline
from fedloom.runs.files import digest, digest_of_file, remove_folder, write_folder_atomically
from fedloom.runs.stacks import Distant, StackFile, StoredRow, alike, stacked
from fedloom.sharing.codec import packed
from fedloom.sharing.plan import Tensors

SCHEMA = 1


@dataclass(frozen=True)
class Checkpoint:
    """A federation's state as named tensors, and what the index says about it."""

    __repr__ = in_outline

    round: int
    server: Tensors
    silos: Mapping[str, Mapping[str, Tensor]]  # by silo name, in memory or in a file; absent if it keeps nothing
    facts: dict[str, Any]  # config digest, seed, participants, setting: whatever the run wants to find again


def folder_of(run: Path, round_number: int) -> Path:
    """Where the checkpoint of a round lies."""
    return run / "checkpoints" / f"round-{round_number:04d}"


def save_checkpoint(run: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Write it whole or not at all, then drop all but the newest ``keep``."""
    files = {"server.safetensors": packed(checkpoint.server)}
    owners: dict[str, list[str | None]] = {}  # of the rows of each file; none where a silo has newer tensors elsewhere
    held = {
        name: dict(table.items()) if isinstance(table, Distant) else table
        for name, table in checkpoint.silos.items()
        if not isinstance(table, StoredRow)
    }
    for names in alike(held):
        file_name = f"silos-{len(owners)}.safetensors"
        files[file_name] = stacked([held[name] for name in names])
        owners[file_name] = list(names)
    stored: dict[StackFile, list[str | None]] = {}
    for name, table in checkpoint.silos.items():
        if isinstance(table, StoredRow):
            stored.setdefault(table.file, [None] * table.file.rows)[table.position] = name
    links = {f"silos-{len(owners) + number}.safetensors": file for number, file in enumerate(stored)}
    owners |= {file_name: stored[file] for file_name, file in links.items()}
    index = {
        "schema": SCHEMA,
        "round": checkpoint.round,
        **checkpoint.facts,
        "stacks": {file_name: {"silos": names} for file_name, names in owners.items()},
        "sha256": {name: digest(data) for name, data in files.items()}
        | {file_name: file.sha256 for file_name, file in links.items()},
    }
    files["index.json"] = json.dumps(index, indent=2).encode()
    paths = {file_name: file.path for file_name, file in links.items()}
    write_folder_atomically(folder_of(run, checkpoint.round), files, paths)
    for old in checkpoint_rounds(run)[:-keep]:
        remove_folder(folder_of(run, old))


def checkpoint_rounds(run: Path) -> list[int]:
    """The rounds that have a checkpoint, oldest first."""
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"round-(\d+)", name)))


def newest_facts(run: Path) -> dict[str, Any]:
    """What the newest checkpoint says beside its tensors, which are not looked at; nothing where there is none."""
    rounds = checkpoint_rounds(run)
    try:
        return dict(
            json.loads((folder_of(run, rounds[-1]) / "index.json").read_text(encoding="utf-8")) if rounds else {}
        )
    except (OSError, ValueError, TypeError):  # whoever loads it will say what is wrong
        return {}


def load_checkpoint(run: Path, round_number: int | None = None) -> Checkpoint:
    """The checkpoint of a round, by default the newest; every file is verified, what silos keep read when asked for."""
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
        for name, checksum in index["sha256"].items():
            if digest_of_file(folder / name) != checksum:
                raise ValueError(f"{name} does not match its checksum")
        silos: dict[str, StoredRow] = {}
        for name, stack in index["stacks"].items():
            with safe_open(folder / name, framework="pt") as opened:
                file = StackFile(folder / name, list(opened.keys()), len(stack["silos"]), index["sha256"][name])
            silos |= {silo: StoredRow(file, row) for row, silo in enumerate(stack["silos"]) if silo is not None}
        known = {"schema", "round", "stacks", "sha256"}
        facts = {key: value for key, value in index.items() if key not in known}
        return Checkpoint(index["round"], load_file(folder / "server.safetensors"), silos, facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise RunFolderError(
            f"{folder} is damaged ({error}); remove it to go on from the checkpoint before it"
        ) from error
