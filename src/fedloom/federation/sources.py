"""Where records come from: each source is a name that ``data.source`` may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.federation import archives, sample
from fedloom.federation.camelyon import load_camelyon
from fedloom.federation.charm import load_charm
from fedloom.federation.files import load_embeddings, load_image_folders, load_npz
from fedloom.federation.parquet import load_parquet
from fedloom.federation.records import Dataset, Records, concatenate
from fedloom.federation.tables import adult_sample, load_tables
from fedloom.registry import Registry

MNIST_CLASSES = tuple(f"mnist/{digit}" for digit in range(10))
FASHION_CLASSES = tuple(
    f"fashion-mnist/{garment}"
    for garment in (
        "t-shirt",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle-boot",
    )
)
CLASSES = {"mnist": MNIST_CLASSES, "fashion-mnist": FASHION_CLASSES}


@dataclass(frozen=True)
class Source:
    """A source of records: what it is, and how ``data.path`` becomes a data set."""

    description: str
    load: Callable[[str], Dataset]


def _domain(name: str, group: str, read: Callable[[str, str], NDArray[np.uint8]]) -> Dataset:
    """MNIST or Fashion-MNIST alone; ``read`` gives the array of a split and a kind (images or labels)."""

    def records(split: str) -> Records:
        images, labels = read(split, "images"), read(split, "labels")
        return Records(
            x=torch.from_numpy(images.copy()).unsqueeze(1),
            y=torch.from_numpy(labels.astype(np.int64)),
            group=torch.zeros(len(labels), dtype=torch.int64),
        )

    return Dataset(name=name, train=records("train"), test=records("test"), groups=(group,), classes=CLASSES[group])


def mixed(name: str, domains: Sequence[Dataset]) -> Dataset:
    """Data sets of one group each, put together: classes are numbered on from one to the next."""

    def shifted(records: Records, group: int, first_class: int) -> Records:
        return replace(records, y=records.y + first_class, group=torch.full_like(records.group, group))

    first_classes = np.cumsum([0] + [len(domain.classes) for domain in domains])
    return Dataset(
        name=name,
        train=concatenate([shifted(d.train, g, int(first_classes[g])) for g, d in enumerate(domains)]),
        test=concatenate([shifted(d.test, g, int(first_classes[g])) for g, d in enumerate(domains)]),
        groups=tuple(domain.groups[0] for domain in domains),
        classes=tuple(label for domain in domains for label in domain.classes),
    )


@cache
def _sample(name: str) -> Dataset:
    return _domain(f"{name}-sample", name, lambda split, kind: sample.load(name, split, kind))


def _full(name: str) -> Dataset:
    return _domain(name, name, lambda split, kind: archives.load(name, split, kind))


_OWN = {
    "mixed-mnist-sample": Source(
        "MNIST and Fashion-MNIST as two groups, 6,000 + 1,000 images each, in the package",
        lambda _: mixed("mixed-mnist-sample", [_sample("mnist"), _sample("fashion-mnist")]),
    ),
    "mnist-sample": Source("MNIST, 6,000 + 1,000 images, in the package", lambda _: _sample("mnist")),
    "fashion-mnist-sample": Source(
        "Fashion-MNIST, 6,000 + 1,000 images, in the package", lambda _: _sample("fashion-mnist")
    ),
    "mixed-mnist": Source(
        "MNIST and Fashion-MNIST as two groups, 60,000 + 10,000 images each; see 'fedloom data get'",
        lambda _: mixed("mixed-mnist", [_full("mnist"), _full("fashion-mnist")]),
    ),
    "mnist": Source("MNIST, 60,000 + 10,000 images; see 'fedloom data get'", lambda _: _full("mnist")),
    "fashion-mnist": Source(
        "Fashion-MNIST, 60,000 + 10,000 images; see 'fedloom data get'", lambda _: _full("fashion-mnist")
    ),
    "charm": Source(
        "CHARM or its stand-in, five image domains as groups, 32x32 colour; docs/fissionvae.md says how to get it",
        load_charm,
    ),
    "image-folders": Source(
        "your images in data.path: one folder a silo, inside it one folder a class if you like", load_image_folders
    ),
    "npz": Source("your arrays in the .npz file data.path: x_train, y_train, group_train, owner_train", load_npz),
    "parquet": Source(
        "records in the Parquet file data.path, as 'fedloom synthesize --format parquet' writes it", load_parquet
    ),
    "adult-sample": Source("Adult, 4,000 + 1,000 rows of a census, in the package", lambda _: adult_sample()),
    "table": Source(
        "rows in CSV or Parquet files of the folder data.path: one file a silo, with schema.toml beside", load_tables
    ),
    "embeddings": Source("labelled vectors in the .npz file data.path, as 'fedloom embed' writes it", load_embeddings),
    "camelyon17": Source(
        "Camelyon17 in the WILDS folder data.path: hospitals as silos, the official test hospital held out",
        lambda path: load_camelyon(path, "official"),
    ),
    "camelyon17-hospitals": Source(
        "Camelyon17 in the WILDS folder data.path: all five hospitals as silos, patients of each held out",
        lambda path: load_camelyon(path, "patients"),
    ),
}
SOURCES: Registry[Source] = Registry("source", "fedloom.sources", Source, lambda: _OWN)
