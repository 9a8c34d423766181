"""The folder of a release: its contents, a card, and a manifest with checksums. It appears whole, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fedloom
from fedloom.errors import ConfigError
from fedloom.release.provenance import Provenance
from fedloom.runs.files import digest_of_file, folder_appearing

SCHEMA = 1
CARD, MANIFEST, ATTRIBUTES = "README.md", "manifest.json", ".gitattributes"
STORED_APART = ("*.safetensors", "*.onnx", "*.parquet", "*.npz", "*.png")  # in a repository
LARGE = "filter=lfs diff=lfs merge=lfs -text"


def check_place(out: Path) -> None:
    """Complain, before any work is done, where something lies already."""
    if out.exists():
        raise ConfigError(f"--out = '{out}' exists already; choose a path where nothing is")


@contextmanager
def release_folder(
    out: Path, provenance: Provenance, contents: Mapping[str, Any], card: str, *, to_hub: bool = False
) -> Iterator[Path]:
    """A folder to put files into; ``contents`` go into the manifest, and nothing in it tells the time.

    With ``to_hub`` it is a repository of Hugging Face, to be uploaded as it is.
    """
    with folder_appearing(out) as folder:
        yield folder
        if to_hub:
            (folder / ATTRIBUTES).write_text("".join(f"{each} {LARGE}\n" for each in STORED_APART), encoding="utf-8")
        (folder / CARD).write_text(card, encoding="utf-8")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        manifest = {
            "schema": SCHEMA,
            "fedloom": fedloom.__version__,
            **contents,
            "run": provenance.to_mapping(),
            "files": {
                path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest_of_file(path)}
                for path in files
            },
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")


def file_names(names: tuple[str, ...]) -> dict[str, str]:
    """A name for files and folders for each name: letters, digits, - and _ alone, and no two alike on any system."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for number, name in enumerate(names):
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in name)[:64] or "_"
        unique = plain if plain.casefold() not in taken else f"{plain}-{number}"
        while unique.casefold() in taken:
            unique += "_"
        taken.add(unique.casefold())
        found[name] = unique
    return found
