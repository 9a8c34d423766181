"""CHARM, the five image domains of FissionVAE (Hu et al., IJCAI 2025), read from one npz file."""

from __future__ import annotations

from pathlib import Path

from fedloom.errors import DataError, page_path
from fedloom.federation.archives import cache_folder, data_folder
from fedloom.federation.files import load_npz
from fedloom.federation.records import Dataset

GROUPS = ("animals", "cartoon", "human", "marine", "remote")  # sorted, as every npz file's groups are
SHAPE = (3, 32, 32)
FILE = Path("charm") / "charm.npz"  # in the cache or under FEDLOOM_DATA


def load_charm(path: str) -> Dataset:
    """The domains as groups: an npz file with ``x_train``, ``group_train``, ``x_test`` and ``group_test``."""
    file = locate(path)
    dataset = load_npz(str(file))
    if dataset.groups != GROUPS or dataset.train.shape != SHAPE:
        raise DataError(
            f"{file} is not CHARM: its groups are {', '.join(dataset.groups)} and its records have shape "
            f"{dataset.train.shape}; CHARM has {', '.join(GROUPS)} of shape {SHAPE}"
        )
    return dataset


def locate(path: str = "") -> Path:
    """The file that ``data.path`` names; if it names none, the one in the cache, else the one under $FEDLOOM_DATA."""
    folders = [folder for folder in (cache_folder(), data_folder()) if folder is not None]
    candidates = [Path(path).expanduser()] if path else [folder / FILE for folder in folders]
    for file in candidates:
        if file.is_file():
            return file
    raise DataError(
        f"CHARM is not on this machine (looked for {' and '.join(map(str, candidates))}); "
        f"{page_path('how-to/charm.md')} says how to assemble it or a stand-in, and data.path can name the file"
    )
