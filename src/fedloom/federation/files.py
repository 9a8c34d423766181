"""Arrays that people bring in .npz files."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.errors import ConfigError, DataError
from fedloom.federation.arrays import Examples, assemble, column, examples
from fedloom.federation.records import Dataset
from fedloom.modalities.base import MODALITIES

MEDMNIST_NAMES = {
    "train_images": "x_train",
    "train_labels": "y_train",
    "test_images": "x_test",
    "test_labels": "y_test",
}
ATTRIBUTE = "attribute_"
COLUMNS = ("y_", "group_", "owner_", "subject_", ATTRIBUTE)


def load_npz(path: str) -> Dataset:
    """Arrays in an .npz file: ``x_train``, and where known ``y_train``, ``group_train``, ``owner_train`` and others.

    ``x`` holds uint8 or float images of shape (n, height, width), (n, channels, height, width) or
    (n, height, width, 1 or 3), or float features of shape (n, d). ``y`` (class), ``group``, ``owner`` (the silo, for
    ``data.partition = "natural"``), ``subject`` (whose record it is) and ``attribute_<name>`` hold a whole number or
    a text for each record. ``x_test``, ``y_test`` and so on are the held-out records; without ``x_test`` a tenth of
    the records, chosen at random, is held out. ``modality`` is the name of what the records are, where they are neither
    images nor vectors. The names of MedMNIST files (``train_images``, ``train_labels``,
    ``test_images``, ``test_labels``) are understood too, and their ``val_*`` is left out.
    """
    file = existing(path, "npz", "an .npz file")
    arrays = _arrays(file)
    if "x_train" not in arrays:
        raise DataError(f"{file} has no array 'x_train' (or 'train_images')")

    kind = str(arrays.get("modality", ""))

    def table(split: str) -> Examples:
        x = examples(arrays[f"x_{split}"], f"x_{split} of {file}", kind)
        found = {
            key.removesuffix(f"_{split}"): column(arrays[key], len(x), f"{key} of {file}")
            for key in arrays
            if key.endswith(f"_{split}") and key.startswith(COLUMNS)
        }
        attributes = {key.removeprefix(ATTRIBUTE): found.pop(key) for key in list(found) if key.startswith(ATTRIBUTE)}
        return Examples(x, attributes=attributes, kind=kind, **found)

    return assemble(file.stem, table("train"), table("test") if "x_test" in arrays else None)


def load_embeddings(path: str) -> Dataset:
    """An .npz file of labelled vectors, such as ``fedloom embed`` writes; what could not be learned from is refused."""
    dataset = load_npz(path)
    if dataset.train.modality is not MODALITIES["vector"]:
        raise DataError(f"{path} holds records of shape {dataset.train.shape}, not vectors; 'fedloom embed' makes some")
    for name, records in (("training", dataset.train), ("held-out", dataset.test)):
        if bool((records.y < 0).any()):
            raise DataError(f"{path} gives {int((records.y < 0).sum())} of its {name} records no label; all need one")
    learned = torch.unique(dataset.train.y)
    if len(learned) < 2:
        raise DataError(f"{path} has the class '{dataset.classes[learned[0]]}' alone; at least two must be told apart")
    if unseen := sorted(set(range(len(dataset.classes))) - set(learned.tolist())):
        raise DataError(f"{path} holds out class '{dataset.classes[unseen[0]]}', which no training record has")
    return dataset


def _arrays(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file under our names for them."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            return {MEDMNIST_NAMES.get(key, key): stored[key] for key in stored}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        # NumPy takes anything else for a pickle, and says how to load one: advice that nobody should follow.
        why = "it is damaged, of another kind, or holds Python objects" if isinstance(error, ValueError) else error
        raise DataError(f"cannot read {file} as an .npz file: {why}") from error


def existing(path: str, source: str, wanted: str) -> Path:
    """``data.path``, which a source needs to name something."""
    if not path:
        raise ConfigError(f"data.path is empty, but data.source = '{source}' needs it to name {wanted}")
    found = Path(path).expanduser()
    if not found.exists():
        raise DataError(f"data.path = '{path}' does not exist; data.source = '{source}' needs {wanted}")
    return found
