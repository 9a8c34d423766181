"""The full MNIST and Fashion-MNIST: their files, their checksums, and where they lie on this machine."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError
from fedloom.federation import idx

FILES = {
    ("train", "images"): "train-images-idx3-ubyte.gz",
    ("train", "labels"): "train-labels-idx1-ubyte.gz",
    ("test", "images"): "t10k-images-idx3-ubyte.gz",
    ("test", "labels"): "t10k-labels-idx1-ubyte.gz",
}


@dataclass(frozen=True)
class Archive:
    """A published data set of four IDX files."""

    folder: str  # its name in the cache and under FEDLOOM_DATA
    mirrors: tuple[str, ...]
    sha256: dict[str, str]  # of the decompressed bytes, because mirrors compress differently


ARCHIVES = {
    "mnist": Archive(
        folder="mnist",
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        sha256={
            "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    ),
    "fashion-mnist": Archive(
        folder="fashion_mnist",
        mirrors=(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        ),
        sha256={
            "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
    ),
}


def cache_folder() -> Path:
    """Where ``fedloom data get`` puts data: $FEDLOOM_CACHE, else .cache/fedloom/data in the home folder."""
    configured = os.environ.get("FEDLOOM_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "fedloom" / "data"


def data_folder() -> Path | None:
    """The folder of data that somebody else keeps on this machine, named by $FEDLOOM_DATA."""
    configured = os.environ.get("FEDLOOM_DATA")
    return Path(configured) if configured else None


def contents(path: Path, sha256: str) -> bytes:
    """The decompressed bytes of a file, once their checksum is right."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: it is not a whole gzip file") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise DataError(f"{path} is damaged or not what its name says: its checksum differs")
    return raw


def locate(name: str) -> Path:
    """The folder that holds all files of an archive: in the cache, else in $FEDLOOM_DATA."""
    archive = ARCHIVES[name]
    for base in (cache_folder(), data_folder()):
        if base is not None and all((base / archive.folder / file).is_file() for file in FILES.values()):
            return base / archive.folder
    raise DataError(
        f"the full '{name}' is not on this machine; run 'fedloom data get {name}', "
        f"or set FEDLOOM_DATA to a folder that holds {archive.folder}/"
    )


def load(name: str, split: str, kind: str) -> NDArray[np.uint8]:
    """The ``images`` or ``labels`` of an archive's split, ``train`` or ``test``."""
    file = FILES[split, kind]
    path = locate(name) / file
    return idx.decode(contents(path, ARCHIVES[name].sha256[file]), str(path))
