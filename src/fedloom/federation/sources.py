"""Where records come from: each source is a name that ``data.source`` may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.config import DataConfig
from fedloom.errors import ConfigError, page_path
from fedloom.federation import archives, sample
from fedloom.federation.camelyon import load_camelyon
from fedloom.federation.charm import load_charm
from fedloom.federation.files import load_embeddings, load_npz
from fedloom.federation.parquet import load_parquet
from fedloom.federation.picture_files import PictureRule
from fedloom.federation.picture_folders import Layout, load_image_folders
from fedloom.federation.picture_tables import load_picture_tables
from fedloom.federation.records import Dataset, Records, concatenate
from fedloom.federation.tables import adult_sample, load_tables
from fedloom.modalities import frequencies
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
KEPT = 8  # frequencies along each side
OF_PICTURES = ("size", "crop", "mode", "window", "subjects", "columns")  # settings
MODES = {1: "grey", 3: "colour"}  # by the number of channels
CLASSES = {"mnist": MNIST_CLASSES, "fashion-mnist": FASHION_CLASSES}


@dataclass(frozen=True)
class Source:
    """A source of records: what it is, how ``data.path`` becomes a data set, and whether everybody has the records."""

    description: str
    load: Callable[[str], Dataset]
    public: bool = False
    medical: bool = False  # whether its records are patients'
    pictures: Callable[[str, Layout], Dataset] | None = None  # where records are pictures in files of their own
    stand_in: str = ""  # the source that is taken where no data.path is named

    def open(self, config: DataConfig) -> Dataset:
        """The data set of these settings; those of pictures are refused where there are none."""
        if self.stand_in and not config.path:
            return _OWN[self.stand_in].load("")
        if self.pictures is not None:
            return self.pictures(config.path, Layout(PictureRule.of(config), config.subjects, config.columns))
        usual, dataset = DataConfig(), self.load(config.path)
        already = {"size": dataset.train.shape[-1], "mode": MODES.get(dataset.train.shape[0])}  # as a preset asks
        for name in OF_PICTURES:
            if (value := getattr(config, name)) not in (getattr(usual, name), already.get(name)):
                raise ConfigError(
                    f"data.{name} = {value!r} is for pictures in files of their own, and data.source = "
                    f"'{config.source}' has none"
                )
        return dataset


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


def _frequencies(name: str) -> Dataset:
    """The sample by its lowest frequencies: as short as embeddings, and still something to look at."""
    images = _sample(name)

    def records(table: Records) -> Records:
        return replace(table, x=frequencies.of_images(table.x.squeeze(1), KEPT), kind=frequencies.MODALITY.name)

    return replace(images, name=f"{name} by frequencies", train=records(images.train), test=records(images.test))


def _full(name: str) -> Dataset:
    return _domain(name, name, lambda split, kind: archives.load(name, split, kind))


_OWN = {
    "mixed-mnist-sample": Source(
        "MNIST and Fashion-MNIST as two groups, 6,000 + 1,000 images each, in the package",
        lambda _: mixed("mixed-mnist-sample", [_sample("mnist"), _sample("fashion-mnist")]),
        public=True,
    ),
    "mnist-sample": Source("MNIST, 6,000 + 1,000 images, in the package", lambda _: _sample("mnist"), public=True),
    "fashion-mnist-sample": Source(
        "Fashion-MNIST, 6,000 + 1,000 images, in the package", lambda _: _sample("fashion-mnist"), public=True
    ),
    "mnist-frequencies": Source(
        "MNIST by the 64 lowest frequencies of each image, 6,000 + 1,000 vectors, in the package",
        lambda _: _frequencies("mnist"),
        public=True,
    ),
    "fashion-frequencies": Source(
        "Fashion-MNIST by the 64 lowest frequencies of each image, 6,000 + 1,000 vectors, in the package",
        lambda _: _frequencies("fashion-mnist"),
        public=True,
    ),
    "mixed-mnist": Source(
        "MNIST and Fashion-MNIST as two groups, 60,000 + 10,000 images each; see 'fedloom data get'",
        lambda _: mixed("mixed-mnist", [_full("mnist"), _full("fashion-mnist")]),
        public=True,
    ),
    "mnist": Source("MNIST, 60,000 + 10,000 images; see 'fedloom data get'", lambda _: _full("mnist"), public=True),
    "fashion-mnist": Source(
        "Fashion-MNIST, 60,000 + 10,000 images; see 'fedloom data get'", lambda _: _full("fashion-mnist"), public=True
    ),
    "charm": Source(
        "CHARM or its stand-in, five image domains as groups, 32x32 colour; "
        f"{page_path('how-to/charm.md')} says how to get it",
        load_charm,
    ),
    "image-folders": Source(
        "your images in data.path: one folder a silo, inside it one folder a class if you like",
        load_image_folders,
        pictures=load_image_folders,
    ),
    "hugging-face": Source(
        "your images in data.path: a folder of Hugging Face datasets, or Parquet files; data.columns names silos",
        load_picture_tables,
        pictures=load_picture_tables,
    ),
    "images": Source(
        "your images in data.path as 'image-folders' has them; without a path the images of 'mixed-mnist-sample'",
        load_image_folders,
        pictures=load_image_folders,
        stand_in="mixed-mnist-sample",
    ),
    "npz": Source("your arrays in the .npz file data.path: x_train, y_train, group_train, owner_train", load_npz),
    "parquet": Source(
        "records in the Parquet file data.path, as 'fedloom synthesize --format parquet' writes it", load_parquet
    ),
    "adult-sample": Source(
        "Adult, 4,000 + 1,000 rows of a census, in the package", lambda _: adult_sample(), public=True
    ),
    "table": Source(
        "rows in CSV or Parquet files of the folder data.path: one file a silo, with schema.toml beside", load_tables
    ),
    "embeddings": Source("labelled vectors in the .npz file data.path, as 'fedloom embed' writes it", load_embeddings),
    "camelyon17": Source(
        "Camelyon17 in the WILDS folder data.path: hospitals as silos, the official test hospital held out",
        lambda path: load_camelyon(path, "official"),
        medical=True,
    ),
    "camelyon17-hospitals": Source(
        "Camelyon17 in the WILDS folder data.path: all five hospitals as silos, patients of each held out",
        lambda path: load_camelyon(path, "patients"),
        medical=True,
    ),
}
SOURCES: Registry[Source] = Registry("source", "fedloom.sources", Source, lambda: _OWN)


def is_public(config: DataConfig) -> bool:
    """Whether everybody has the records of these settings, outliers among them: it is said there, or known here."""
    sources = [(config.source, config.path)]
    if config.outliers.source:
        sources.append((config.outliers.source, config.outliers.path))
    return config.public or all(_is_known_as_public(source, path) for source, path in sources)


def _is_known_as_public(name: str, path: str) -> bool:
    try:
        source = SOURCES.get(name, "data.source")
        return source.public or bool(source.stand_in and not path and _OWN[source.stand_in].public)
    except ConfigError:  # the plug-in of an old run may be gone, and its records are nobody's meanwhile
        return False
