"""A federation before its groups are known, and with those that were found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.discovery.clustering import FEWEST, hierarchy
from fedloom.errors import ConfigError, DataError
from fedloom.federation.arrays import ONE_GROUP
from fedloom.federation.records import Federation, Records, Silo
from fedloom.federation.remote import RemoteSilo
from fedloom.streams import Streams


def check_unnamed(federation: Federation, groups: int) -> None:
    """Refuse where nothing could be found."""
    hierarchy()
    if len(federation) < FEWEST:
        raise ConfigError(
            f"data.groups = 'discover' needs at least {FEWEST} silos, and '{federation.name}' has {len(federation)}: "
            "so few cannot be told from silos without groups"
        )
    if groups > len(federation):
        raise ConfigError(f"discovery.groups = {groups} must be at most {len(federation)}, the number of silos")


def names_of(groups: int) -> tuple[str, ...]:
    """What so many groups are called: they are numbered in the order of their first silo."""
    return (ONE_GROUP,) if groups == 1 else tuple(f"group-{number}" for number in range(1, groups + 1))


def unnamed(federation: Federation) -> Federation:
    """The same silos, all in one group."""
    return with_groups(federation, {silo.name: ONE_GROUP for silo in federation.silos}, Streams(0))


def with_groups(federation: Federation, group_of: Mapping[str, str], streams: Streams) -> Federation:
    """The same silos in the groups that were found.

    Held-out records go where the silo is that held them out. Where none is known they are dealt among the groups as
    the training records of their own, true group are.
    """
    names = names_of(len(set(group_of.values())))
    if set(group_of) != {silo.name for silo in federation.silos} or set(group_of.values()) != set(names):
        raise DataError(f"the groups that were found are not those of the silos of '{federation.name}'")
    numbers = [names.index(group_of[silo.name]) for silo in federation.silos]
    silos = tuple(_placed(silo, number) for silo, number in zip(federation.silos, numbers, strict=True))
    place = {silo.name: number for silo, number in zip(federation.silos, numbers, strict=True)}
    unseen = federation.unseen_outliers
    return replace(
        federation,
        silos=silos,
        groups=names,
        test=_dealt(federation.test, federation, numbers, streams),
        unseen_outliers=None if unseen is None else _dealt(unseen, federation, numbers, streams),
        canaries=tuple(replace(each, records=_in(each.records, place[each.silo])) for each in federation.canaries),
    )


def told(federation: Federation, groups: tuple[str, ...], group: str) -> Federation:
    """What a silo knows that was told its own group and no other's: it takes them all to be of this one."""
    if group not in groups or groups != names_of(len(groups)):
        raise DataError(f"'{group}' is none of the groups {groups} as those are called that are found")
    number = groups.index(group)
    silos = tuple(_placed(each, number) for each in federation.silos)
    return replace(federation, silos=silos, groups=groups, test=_in(federation.test, number))


def _placed(silo: Silo, group: int) -> Silo:
    if isinstance(silo, RemoteSilo):
        return replace(silo, declared=(group,), named=False)
    validation = silo.validation and _in(silo.validation, group)
    return replace(silo, train=_in(silo.train, group), validation=validation, named=False)


def _in(records: Records, group: int) -> Records:
    return replace(records, group=torch.full_like(records.group, group))


def _dealt(held_out: Records, federation: Federation, numbers: list[int], streams: Streams) -> Records:
    counts = torch.zeros(len(federation.groups), max(numbers) + 1, dtype=torch.float64)
    for silo, number in zip(federation.silos, numbers, strict=True):
        if isinstance(silo, RemoteSilo):  # of which nobody says how many it holds
            counts[list(silo.declared), number] += 1
        counts[:, number] += torch.bincount(silo.train.group, minlength=len(federation.groups))
    counts[counts.sum(dim=1) == 0] = counts.sum(dim=0)  # nobody trains on such records
    shares = (counts / counts.sum(dim=1, keepdim=True)).cumsum(dim=1)[held_out.group]
    coins = streams.uniform("discovery/held-out", len(held_out)).to(torch.float64)
    group: Tensor = (coins[:, None] >= shares[:, :-1]).sum(dim=1)
    if held_out.home is not None:
        known = held_out.home >= 0
        group[known] = torch.tensor(numbers)[held_out.home[known]]
    return replace(held_out, group=group)
