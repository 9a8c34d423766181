"""Outliers on purpose: records of another source, put into chosen silos to see whether training gives them away."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedloom.config import OutliersConfig
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.federation.records import Federation, Records, Silo, concatenate
from fedloom.federation.sources import SOURCES
from fedloom.streams import Streams

OUTLIER = "outlier"  # the class of every record that was put in; no held-out record has it


def is_outlier(federation: Federation, records: Records) -> Tensor:
    """For each record whether it was put in as an outlier, shape (n,)."""
    if OUTLIER not in federation.classes:
        return torch.zeros(len(records), dtype=torch.bool)
    return records.y == federation.classes.index(OUTLIER)


def with_outliers(federation: Federation, settings: OutliersConfig, streams: Streams) -> Federation:
    """The federation with outliers in the silos that the settings name, no record twice.

    They are drawn from the other source's training records; its held-out ones stand beside them, to tell what a model
    makes of such records that it never saw. The federation's own held-out records stay as they are. A share of 0 puts
    none in, as a control.
    """
    if not settings.source:
        return federation
    names = [silo.name for silo in federation.silos]
    if not settings.silos and settings.share:
        raise ConfigError(f"data.outliers.silos is empty; name the silos that get them, such as '{names[0]}'")
    for name in settings.silos:
        if name not in names:
            raise ConfigError("data.outliers.silos: " + unknown("silo", name, names))
    pool, unseen = _like(federation, settings)
    counts = [
        max(1, round(settings.share * len(silo))) if settings.share and silo.name in settings.silos else 0
        for silo in federation.silos
    ]
    if sum(counts) > len(pool):
        raise DataError(
            f"data.outliers.share = {settings.share:g} asks for {sum(counts)} outliers, but data.outliers.source = "
            f"'{settings.source}' has {len(pool)}"
        )
    label = len(federation.classes)
    parts = torch.split(streams.permutation("outliers", len(pool))[: sum(counts)], counts)
    silos = tuple(
        Silo(silo.name, concatenate([silo.train, _as_own(silo, number, pool.take(part), label, streams)]))
        if len(part)
        else silo
        for number, (silo, part) in enumerate(zip(federation.silos, parts, strict=True))
    )
    return replace(
        federation,
        silos=silos,
        classes=(*federation.classes, OUTLIER),
        unseen_outliers=replace(unseen, y=torch.full_like(unseen.y, label)),
    )


def _like(federation: Federation, settings: OutliersConfig) -> tuple[Records, Records]:
    """Training and held-out records of the other source, if they are records like the federation's own."""
    dataset = SOURCES.get(settings.source, "data.outliers.source").load(settings.path)
    if settings.group and settings.group not in dataset.groups:
        raise ConfigError("data.outliers.group: " + unknown("group", settings.group, dataset.groups))
    pool, unseen = dataset.train, dataset.test
    if settings.group:
        number = dataset.groups.index(settings.group)
        pool, unseen = pool.of_group(number), unseen.of_group(number)
    if pool.modality != federation.modality:
        raise DataError(
            f"data.outliers.source = '{settings.source}' has {pool.modality.plural}, but the silos hold "
            f"{federation.modality.plural}"
        )
    own = federation.silos[0].train.x
    if pool.shape != federation.shape or pool.x.dtype != own.dtype:
        raise DataError(
            f"data.outliers.source = '{settings.source}' has {pool.x.dtype} records of shape {pool.shape}, but those "
            f"of the silos are {own.dtype} of shape {federation.shape}"
        )
    return pool, unseen


def _as_own(silo: Silo, number: int, outliers: Records, label: int, streams: Streams) -> Records:
    """Outliers with all that the silo's own records have: group and attributes are those of random ones of them."""
    own = silo.train
    like = own.take(streams.permutation("outliers/like", max(len(own), len(outliers)), silo=number) % len(own))
    like = like.take(torch.arange(len(outliers)))
    first = 0 if own.subject is None else int(own.subject.max()) + 1
    return Records(
        x=outliers.x,
        y=torch.full_like(outliers.y, label),
        group=like.group,
        subject=None if own.subject is None else first + torch.arange(len(outliers)),  # each a person of its own
        attributes=like.attributes,
        kind=own.kind,
    )
