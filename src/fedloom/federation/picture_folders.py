"""Folders of pictures: which file belongs to which silo, class and subject."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedloom.config import ColumnsConfig
from fedloom.errors import DataError, FedloomWarning
from fedloom.federation.arrays import ONE_GROUP, Examples, assemble
from fedloom.federation.files import existing
from fedloom.federation.picture_files import KNOWN, PictureReader, PictureRule, reader_of
from fedloom.federation.records import Dataset

HELD_OUT = "test"
NAMED = 5  # of the files in a warning
USUAL, NAMES = PictureRule(), ColumnsConfig()


@dataclass(frozen=True)
class Layout:
    """What folders stand for, and what is done to each picture."""

    rule: PictureRule = USUAL
    subjects: str = ""  # whose pictures they are: "folder", "dicom" (its patient), or not known
    columns: ColumnsConfig = NAMES  # of a table


@dataclass(frozen=True)
class PictureFile:
    """A file with its place."""

    file: Path
    silo: str
    label: str = ""
    subject: str = ""
    held_out: bool = False


def load_image_folders(path: str, layout: Layout | None = None) -> Dataset:
    """One folder a silo; use ``data.partition = "natural"`` to keep the folders as silos.

    ::

        data.path/
          hospital-a/          a silo with unlabelled images: PNG, JPEG, WebP, TIFF, DICOM or NIfTI
            0001.png
          hospital-b/          a silo whose images have classes: one folder a class
            cat/0001.png
            dog/0001.png
          ct__hospital-c/      a silo of the group "ct"; a silo without "group__" belongs to the group "all"
            0001.png
            test/0002.png      optional: the silo's held-out images, laid out as above

    If no silo has a ``test`` folder, a tenth of each silo's images, chosen at random, is held out. With
    ``data.subjects = "folder"`` the innermost folders are subjects.
    """
    layout = layout or Layout()
    if layout.columns != NAMES:
        raise DataError("data.columns is for tables of pictures, and data.source = 'image-folders' has none")
    root = existing(path, "image-folders", "a folder that holds one folder of images for each silo")
    if not root.is_dir():
        raise DataError(f"data.path = '{path}' is not a folder; give one that holds one folder for each silo")
    found = list(silos_of(root, layout))
    _warn_of_strangers(root)
    reader = PictureReader(layout.rule)
    train = _examples([each for each in found if not each.held_out], reader, layout)
    held_out = [each for each in found if each.held_out]
    test = _examples(held_out, reader, layout) if held_out else None
    warn_of_travellers([train, *([test] if test else [])])
    return assemble(root.resolve().name, train, test)


def load_own_images(path: str, layout: Layout | None = None) -> Dataset:
    """One silo's images: a folder laid out as that of a silo in :func:`load_image_folders`."""
    layout = layout or Layout()
    root = existing(path, "image-folders", "a silo's folder of images")
    if not root.is_dir():
        raise DataError(f"'{path}' is neither a folder of images nor an .npz file")
    found = list(files_of(root, layout))
    _warn_of_strangers(root)
    reader = PictureReader(layout.rule)
    tables = [
        replace(_examples(chosen, reader, layout), group=None, owner=None) if chosen else None
        for chosen in ([each for each in found if each.held_out is held_out] for held_out in (False, True))
    ]
    assert tables[0] is not None, "a folder without images is refused"
    return assemble(root.resolve().name, tables[0], tables[1])


def silos_of(root: Path, layout: Layout) -> Iterator[PictureFile]:
    """The pictures of all silos, folder by folder."""
    silos = [folder for folder in listing(root) if folder.is_dir()]
    if root / HELD_OUT in silos:
        raise DataError(
            f"{root / HELD_OUT} is in the place of a silo; put a silo's held-out images into '{HELD_OUT}' inside it"
        )
    if not silos:
        raise DataError(f"data.path = '{root}' holds no folders; give one folder of images for each silo")
    for silo in silos:
        yield from files_of(silo, layout)


def files_of(silo: Path, layout: Layout) -> Iterator[PictureFile]:
    """One silo's pictures, those to train on and those held out."""
    yield from _placed(silo, silo.name, layout, held_out=False)
    if (silo / HELD_OUT).is_dir():
        yield from _placed(silo / HELD_OUT, silo.name, layout, held_out=True)


def _placed(folder: Path, silo: str, layout: Layout, held_out: bool) -> Iterator[PictureFile]:
    inner = [entry for entry in listing(folder) if entry.is_dir() and entry.name != HELD_OUT]
    own = pictures_in(folder) if inner else _some(folder)
    if layout.subjects != "folder":
        yield from (PictureFile(file, silo, held_out=held_out) for file in own)
        for entry in inner:
            yield from (PictureFile(file, silo, entry.name, held_out=held_out) for file in _class(entry))
        return
    if own:
        raise DataError(f"{own[0]} lies in no subject's folder, and data.subjects = 'folder' wants one for each")
    for entry in inner:
        subjects = [each for each in listing(entry) if each.is_dir()]
        for subject, label in [(each, entry.name) for each in subjects] or [(entry, "")]:
            yield from (PictureFile(file, silo, label, subject.name, held_out) for file in _some(subject))


def _class(folder: Path) -> list[Path]:
    if deeper := next((each for each in listing(folder) if each.is_dir()), None):
        raise DataError(
            f"{deeper} lies inside a class; folders of a silo are classes, and data.subjects = 'folder' says that the "
            "innermost are subjects"
        )
    return _some(folder)


def _some(folder: Path) -> list[Path]:
    if found := pictures_in(folder):
        return found
    raise DataError(f"{folder} holds no images; give {KNOWN} files")


def pictures_in(folder: Path) -> list[Path]:
    """The files of a folder that are pictures by their name, or say of themselves that they are DICOM."""
    return [entry for entry in listing(folder) if entry.is_file() and reader_of(entry) is not None]


def strangers_in(root: Path) -> list[Path]:
    """Files anywhere below a folder that are no pictures, and hidden ones not at all."""
    files = sorted(entry for entry in root.rglob("*") if entry.is_file())
    return [
        entry
        for entry in files
        if not any(part.startswith(".") for part in entry.relative_to(root).parts) and reader_of(entry) is None
    ]


def listing(folder: Path) -> list[Path]:
    """What lies in a folder, sorted, without hidden files."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _examples(files: list[PictureFile], reader: PictureReader, layout: Layout) -> Examples:
    read = [reader.read(each.file) for each in files]
    subjects = [each.subject or patient for each, (_, patient) in zip(files, read, strict=True)]
    if layout.subjects == "dicom" and (
        lacking := next((f for f, s in zip(files, subjects, strict=True) if not s), None)
    ):
        raise DataError(f"{lacking.file} names no patient, and data.subjects = 'dicom' needs one in every file")
    return Examples(
        x=torch.from_numpy(np.stack([pixels for pixels, _ in read])),
        y=np.array([each.label for each in files]),
        group=np.array([_group(each.silo) for each in files]),
        owner=np.array([each.silo for each in files]),
        # Whoever they are, they are numbers from here on; their names are kept nowhere.
        subject=np.array(subjects) if layout.subjects else None,
    )


def _group(silo: str) -> str:
    group, separator, _ = silo.partition("__")
    return group if separator else ONE_GROUP


def _warn_of_strangers(root: Path) -> None:
    if found := strangers_in(root):
        named = ", ".join(str(file.relative_to(root)) for file in found[:NAMED])
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        warnings.warn(f"left out, because they are no pictures: {named}{more}", FedloomWarning, stacklevel=3)


def warn_of_travellers(tables: Iterable[Examples]) -> None:
    """Say how many subjects have records at several silos, and what that means for a guarantee."""
    silos: dict[str, set[str]] = {}
    for table in tables:
        if table.subject is not None and table.owner is not None:
            for subject, owner in zip(table.subject.tolist(), table.owner.tolist(), strict=True):
                silos.setdefault(subject, set()).add(owner)
    travellers = sum(len(owners) > 1 for owners in silos.values())
    if travellers:
        warnings.warn(
            f"{travellers} of {len(silos)} subjects have pictures at more than one silo: privacy.unit = 'subject' "
            "protects what a subject has at one silo, and each silo's epsilon counts for itself",
            FedloomWarning,
            stacklevel=3,
        )
