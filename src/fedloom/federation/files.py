"""Data that people bring in files: image folders and npz files."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedloom.errors import ConfigError, DataError
from fedloom.federation.arrays import ONE_GROUP, Examples, assemble, column, examples
from fedloom.federation.records import Dataset
from fedloom.modalities.base import MODALITIES

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
IMAGE_MODES = ("L", "RGB")  # grey and colour
HELD_OUT = "test"


def load_image_folders(path: str) -> Dataset:
    """One folder a silo; use ``data.partition = "natural"`` to keep the folders as silos.

    ::

        data.path/
          hospital-a/          a silo with unlabelled images: PNG or JPEG, all of one size, grey or colour
            0001.png
          hospital-b/          a silo whose images have classes: one folder a class
            cat/0001.png
            dog/0001.png
          ct__hospital-c/      a silo of the group "ct"; a silo without "group__" belongs to the group "all"
            0001.png
            test/0002.png      optional: the silo's held-out images, laid out as above

    If no silo has a ``test`` folder, a tenth of each silo's images, chosen at random, is held out.
    """
    root = existing(path, "image-folders", "a folder that holds one folder of images for each silo")
    if not root.is_dir():
        raise DataError(f"data.path = '{path}' is not a folder; give one that holds one folder for each silo")
    silos = [folder for folder in _listing(root) if folder.is_dir()]
    if root / HELD_OUT in silos:
        raise DataError(
            f"{root / HELD_OUT} is in the place of a silo; put a silo's held-out images into '{HELD_OUT}' inside it"
        )
    if not silos:
        raise DataError(f"data.path = '{path}' holds no folders; give one folder of images for each silo")
    reader = _ImageReader()
    train = _images([(silo, silo) for silo in silos], reader)
    held_out = [(silo, silo / HELD_OUT) for silo in silos if (silo / HELD_OUT).is_dir()]
    return assemble(root.resolve().name, train, _images(held_out, reader) if held_out else None)


def load_own_images(path: str) -> Dataset:
    """One silo's images: a folder laid out as that of a silo in :func:`load_image_folders`."""
    root = existing(path, "image-folders", "a silo's folder of images")
    if not root.is_dir():
        raise DataError(f"'{path}' is neither a folder of images nor an .npz file")
    reader, held_out = _ImageReader(), root / HELD_OUT
    train = replace(_images([(root, root)], reader), group=None, owner=None)
    test = replace(_images([(root, held_out)], reader), group=None, owner=None) if held_out.is_dir() else None
    return assemble(root.resolve().name, train, test)


def _images(folders: list[tuple[Path, Path]], reader: _ImageReader) -> Examples:
    """The images of (silo, folder) pairs; those outside a class folder have no label."""
    found = [(silo.name, label, file) for silo, folder in folders for label, file in _labelled_files(folder)]
    return Examples(
        x=torch.from_numpy(np.stack([reader.read(file) for _, _, file in found])),
        y=np.array([label for _, label, _ in found]),
        group=np.array([_group(silo) for silo, _, _ in found]),
        owner=np.array([silo for silo, _, _ in found]),
    )


def _group(silo: str) -> str:
    group, separator, _ = silo.partition("__")
    return group if separator else ONE_GROUP


def _labelled_files(folder: Path) -> list[tuple[str, Path]]:
    """The image files of a folder (label "") and of its class folders."""
    classes = [entry for entry in _listing(folder) if entry.is_dir() and entry.name != HELD_OUT]
    own = [("", file) for file in _image_files(folder)]
    by_class = {entry: [(entry.name, file) for file in _image_files(entry)] for entry in classes}
    for place, files in by_class.items() if classes else {folder: own}.items():
        if not files:
            raise DataError(f"{place} holds no images; give {', '.join(IMAGE_SUFFIXES)} files")
    return own + [pair for pairs in by_class.values() for pair in pairs]


def _listing(folder: Path) -> list[Path]:
    """What lies in a folder, sorted, without hidden files."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    return [entry for entry in _listing(folder) if entry.is_file() and entry.suffix.lower() in IMAGE_SUFFIXES]


class _ImageReader:
    """Reads images as (channels, height, width) and insists that all are like the first."""

    def __init__(self) -> None:
        self.first: tuple[Path, str, tuple[int, int]] | None = None

    def read(self, file: Path) -> NDArray[np.uint8]:
        try:
            with Image.open(file) as image:
                pixels, mode, size = np.asarray(image), image.mode, image.size
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"cannot read {file} as an image: {error}") from error
        if mode not in IMAGE_MODES:
            raise DataError(f"{file} has mode {mode}; convert it to {' (grey) or '.join(IMAGE_MODES)} (colour)")
        if self.first is None:
            self.first = (file, mode, size)
        first, first_mode, first_size = self.first
        if (mode, size) != (first_mode, first_size):
            raise DataError(
                f"{file} is {size[0]}x{size[1]} {mode}, but {first} is {first_size[0]}x{first_size[1]} "
                f"{first_mode}; all images must have one size and mode"
            )
        return pixels[None] if mode == "L" else np.moveaxis(pixels, 2, 0)


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
