"""Whether silos go by the names of their own groups: a control for what it is worth to know them."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedloom.errors import ConfigError
from fedloom.federation.records import Federation, Silo
from fedloom.streams import Streams


def with_permuted_groups(federation: Federation, streams: Streams) -> Federation:
    """The same silos with the same records, but each goes by the group of another that is drawn at random."""
    for silo in federation.silos:
        if len(silo.groups) > 1:
            raise ConfigError(
                f"data.groups = 'permuted' needs silos of one group each, but '{silo.name}' holds records of "
                f"{len(silo.groups)}: use data.partition = 'groups'"
            )
    order = streams.permutation("group-names", len(federation.silos)).tolist()
    names = [federation.silos[other].groups[0] for other in order]
    silos = tuple(_of_group(silo, name) for silo, name in zip(federation.silos, names, strict=True))
    return replace(federation, silos=silos)


def _of_group(silo: Silo, group: int) -> Silo:
    tables = (silo.train, silo.validation)
    train, validation = (t and replace(t, group=torch.full_like(t.group, group)) for t in tables)
    assert train is not None
    return Silo(silo.name, train, validation)
