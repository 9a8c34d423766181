"""Canaries: records that go into training by a coin each, so that whoever guesses the coins shows what training leaks.

Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023. The coins come from a stream of
the simulation's seed, tossed before training. A model that was trained with canaries is not for release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.config import AuditConfig
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.federation.records import Canaries, Federation, Records, Silo, concatenate
from fedloom.streams import Streams


def canary_coins(streams: Streams, count: int, silo: int = 0) -> Tensor:
    """Which canaries go into a silo's training records: a fair coin for each."""
    return streams.uniform("audit/coins", count, silo=silo) < 0.5


def with_canaries(federation: Federation, settings: AuditConfig, streams: Streams) -> Federation:
    """The federation with canaries in the silos that the settings name, or in all; those that are in come last."""
    if not settings.canaries:
        return federation
    if not federation.modality.compares:
        raise ConfigError(
            f"audit.canaries = {settings.canaries} must be 0 for {federation.modality.plural}: no attack looks for them"
        )
    names = [silo.name for silo in federation.silos]
    for name in settings.silos:
        if name not in names:
            raise ConfigError("audit.silos: " + unknown("silo", name, names))
    chosen = [number for number, name in enumerate(names) if name in (settings.silos or names)]
    if settings.canaries < 2 * len(chosen):
        raise ConfigError(
            f"audit.canaries = {settings.canaries} must be at least 2 for each of the {len(chosen)} silos; name fewer "
            "silos in audit.silos"
        )
    found: dict[int, Canaries] = {}
    test = federation.test
    for place, number in enumerate(chosen):
        count = len(range(place, settings.canaries, len(chosen)))
        records, test = MAKERS[settings.kind](federation.silos[number], number, count, test, streams)
        found[number] = Canaries(names[number], records, canary_coins(streams, count, number))
    silos = tuple(
        Silo(silo.name, concatenate([silo.train, found[number].trained])) if number in found else silo
        for number, silo in enumerate(federation.silos)
    )
    return replace(federation, silos=silos, test=test, canaries=tuple(found.values()))


def _noise(silo: Silo, number: int, count: int, test: Records, streams: Streams) -> tuple[Records, Records]:
    """Every value is an extreme one, by a coin: unlike anything, and as easy to remember as can be."""
    x = silo.train.x
    heads = streams.uniform("audit/noise", count * x[0].numel(), silo=number).reshape(count, *x.shape[1:]) < 0.5
    return _as_own(silo, number, silo.train.modality.extremes(heads, x), streams), test


def _held_out(silo: Silo, number: int, count: int, test: Records, streams: Streams) -> tuple[Records, Records]:
    """Held-out records of the silo's groups, which nobody is measured on any more."""
    fitting = torch.nonzero(torch.isin(test.group, torch.tensor(silo.groups))).flatten()
    if count >= len(fitting):
        raise DataError(
            f"audit.canaries asks for {count} held-out records for silo '{silo.name}', but of its groups only "
            f"{len(fitting)} are left, and some must stay held out; ask for fewer, or set audit.kind = 'noise'"
        )
    taken = fitting[streams.permutation("audit/held-out", len(fitting), silo=number)[:count]]
    stays = torch.ones(len(test), dtype=torch.bool)
    stays[taken] = False
    found = test.take(taken)
    as_own = replace(_as_own(silo, number, found.x, streams), y=found.y, group=found.group)
    return as_own, test.take(torch.nonzero(stays).flatten())


def _as_own(silo: Silo, number: int, x: Tensor, streams: Streams) -> Records:
    """Values with the label, group and attributes of random records of the silo, each a subject of its own."""
    own = silo.train
    index = (streams.uniform("audit/like", len(x), silo=number) * len(own)).to(torch.int64)
    first = 0 if own.subject is None else int(own.subject.max()) + 1
    subject = None if own.subject is None else first + torch.arange(len(x))
    return replace(own.take(index), x=x, subject=subject)


MAKERS: dict[str, Callable[[Silo, int, int, Records, Streams], tuple[Records, Records]]] = {
    "noise": _noise,
    "held-out": _held_out,
}
