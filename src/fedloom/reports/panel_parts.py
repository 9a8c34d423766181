"""What panels are made of, and what they ask of a run before they are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedloom.federation.records import Federation, Records
from fedloom.methods.generator import Generator
from fedloom.modalities.base import modality_of
from fedloom.models.vae import VAE
from fedloom.reports.figures import Figure
from fedloom.reports.subject import Subject
from fedloom.sharing.plan import Scope
from fedloom.streams import Streams

ROW = 10  # images in a row
MOST_GROUPS = 6  # that get pictures of their own


@dataclass(frozen=True)
class NotShownError(Exception):
    """A panel cannot be drawn; an empty reason means that there is nothing to say about it either."""

    reason: str


Drawn = tuple[list[Figure], dict[str, Any]]


@dataclass(frozen=True)
class PanelKind:
    """How a panel is drawn; one that ``shows_records`` is left out where they are nobody's business."""

    title: str
    intro: str
    draw: Callable[[Subject], Drawn]
    shows_records: bool = True


def generator_of(subject: Subject) -> Generator:
    """The generator, where there is one."""
    if subject.generator is None:
        raise NotShownError(f"there is no generator to ask: {subject.no_generator}")
    return subject.generator


def imaging(subject: Subject) -> Generator:
    """The generator, where what it makes can be shown."""
    generator = generator_of(subject)
    one = generator.sample(1, group=generator.groups[0])
    modality, shape = modality_of(generator.kind, tuple(one.shape[1:])), tuple(one.shape[1:])
    if not modality.shows(shape):
        raise NotShownError(f"{modality.plural} of shape {shape} have neither pictures nor columns of a table")
    return generator


def federation_of(subject: Subject) -> Federation:
    """The records, where they can be had."""
    if subject.federation is None:
        raise NotShownError(subject.no_records)
    return subject.federation


def encoding(subject: Subject) -> Generator:
    """The generator, where the server has an encoder that was trained."""
    generator = generator_of(subject)
    if not isinstance(generator.model(generator.groups[0]), VAE):
        raise NotShownError(f"method '{generator.method.name}' has no encoder")
    if generator.method.plan.blocks["encoder"].scope is Scope.SILO:
        raise NotShownError("the encoders never leave the silos, so the server cannot encode an image")
    return generator


def held_out_of(federation: Federation, group: int, count: int, streams: Streams) -> Records:
    """Some held-out records of a group, always the same."""
    records = federation.test.of_group(group)
    return records.take(streams.permutation("report/held-out", len(records), silo=group)[:count])


def streams_of(subject: Subject) -> Streams:
    """The run's random streams."""
    return Streams(subject.run.folder.config.seed)
