"""From images to vectors: frozen public features, shortened and scaled by public rules, in one file for all silos.

Nothing here is fitted to the records. Features are kept by content in the cache folder, part by part, so that an
extraction that was stopped goes on where it stopped, and other projections of the same images cost nothing.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.backbones.base import Backbone
from fedloom.backbones.projections import SCALINGS, directions
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.evaluation.features import FeatureCache
from fedloom.federation.files import ATTRIBUTE
from fedloom.federation.records import UNLABELLED, Dataset, Records
from fedloom.federation.sources import SOURCES
from fedloom.runs.files import write_atomically

PART = 500  # images whose features are kept together
STORAGE = {"float16": np.float16, "float32": np.float32}


@dataclass(frozen=True)
class Preparation:
    """How features become embeddings: projected, then scaled."""

    projection: str = "none"  # "head" or "random": onto so many public directions
    dimension: int = 256
    seed: int = 0  # of random directions
    scaling: str = "l2"
    storage: str = "float32"

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ConfigError(unknown("scaling", self.scaling, SCALINGS))
        if self.storage not in STORAGE:
            raise ConfigError(unknown("storage", self.storage, STORAGE))

    def __call__(self, features: Tensor, backbone: Backbone) -> Tensor:
        """The embeddings of some features."""
        if self.projection != "none":
            chosen = directions(self.projection, backbone, features.shape[1], self.dimension, self.seed)
            features = (features.to(torch.float64) @ chosen).to(torch.float32)
        return SCALINGS[self.scaling](features)


def images_of(named: str, path: str = "") -> Dataset:
    """The data set of that name, or the images of a folder or an .npz file."""
    if named in SOURCES:
        return SOURCES[named].load(path)
    kinds = {True: "npz", False: "image-folders"}
    if not Path(named).expanduser().exists():
        raise ConfigError(f"'{named}' is neither a file or folder nor a data set; 'fedloom list datasets' names those")
    return SOURCES[kinds[named.endswith(".npz")]].load(named)


def embed(
    dataset: Dataset,
    backbone: Backbone,
    preparation: Preparation,
    out: Path,
    cache: Path,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the embeddings of a data set; returns what the file says about itself.

    ``progress`` hears how many of how many images are done.
    """
    if out.suffix != ".npz":
        raise ConfigError(f"the embeddings' file '{out}' must end in .npz")
    if not out.parent.is_dir():
        raise ConfigError(f"the folder of '{out}' does not exist")
    features, arrays = FeatureCache(backbone, cache, dataset.train.modality.decode), {}
    total, done = len(dataset.train) + len(dataset.test), 0
    for split, records in (("train", dataset.train), ("test", dataset.test)):
        parts = []
        for images in torch.split(records.x, PART):
            parts.append(features.features(images, stored=backbone.dimension is not None).cpu())
            done += len(images)
            if progress is not None:
                progress(done, total)
        found = preparation(torch.cat(parts), backbone)
        if not torch.isfinite(found).all():
            raise DataError(f"backbone '{backbone.name}' gave features that are not finite for '{dataset.name}'")
        arrays[f"x_{split}"] = found.numpy().astype(STORAGE[preparation.storage])
        arrays |= {f"{name}_{split}": values for name, values in _columns(dataset, records).items()}
    if dataset.owner is not None:
        arrays["owner_train"] = np.array(dataset.owners)[dataset.owner.numpy()]
    about = {
        "dataset": dataset.name,
        "backbone": backbone.name,
        **asdict(preparation),
        "dimension": int(arrays["x_train"].shape[1]),
        "train": len(dataset.train),
        "test": len(dataset.test),
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]
    write_atomically(out, buffer.getvalue())
    return about


def _columns(dataset: Dataset, records: Records) -> dict[str, NDArray[Any]]:
    """What is known of each record beside its features, under the names of an .npz source."""
    found: dict[str, NDArray[Any]] = {}
    if dataset.classes:
        found["y"] = _named(dataset.classes, records.y)
    if len(dataset.groups) > 1:
        found["group"] = np.array(dataset.groups)[records.group.numpy()]
    if records.subject is not None:
        found["subject"] = records.subject.numpy()
    if records.attributes is not None:
        for name in dict.fromkeys(each.partition("=")[0] for each in dataset.attributes):
            columns = [i for i, each in enumerate(dataset.attributes) if each.partition("=")[0] == name]
            values = np.array(["", *(dataset.attributes[i].partition("=")[2] for i in columns)])
            known = records.attributes[:, columns]
            found[ATTRIBUTE + name] = values[torch.where(known.any(dim=1), 1 + known.argmax(dim=1), 0).numpy()]
    return found


def _named(classes: tuple[str, ...], labels: Tensor) -> NDArray[Any]:
    """The classes' names, as numbers where all of them are, so that their order stays; the last is for no class."""
    numbers = all(name.isdecimal() for name in classes)
    names = np.array([*map(int, classes), UNLABELLED] if numbers else [*classes, ""])
    return np.asarray(names[labels.numpy()])
