"""The one release by which silos are grouped: what it is, what it costs, and what the server reads from all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from fedloom.config import Config
from fedloom.discovery.clustering import Found, find_groups
from fedloom.discovery.features import EMBEDDING, FourierFeatures
from fedloom.errors import ConfigError
from fedloom.federation.records import Federation
from fedloom.federation.rounds import Site
from fedloom.privacy.ledger import BEFORE
from fedloom.privacy.noise import NoiseKey, StreamNoise
from fedloom.privacy.payload_sums import BoundedSum, Query, SumNoise
from fedloom.privacy.silo_privacy import PlannedPayload, SiloPrivacy, unit_numbers
from fedloom.sharing.plan import RECORD_COUNT, SharingPlan, payload_of_sums
from fedloom.sharing.update import EgressRecord, Update, check_update, pass_egress
from fedloom.streams import Streams

RELEASE = "discovery"
SHARE = 0.1  # of the budget


def statistic(config: Config) -> BoundedSum:
    """The sum of what a silo's records add; one more or less moves it by at most 1."""
    return BoundedSum(_features(config))


def _features(config: Config) -> FourierFeatures:
    return FourierFeatures(config.discovery.frequencies, config.seed)


def planned_release(config: Config) -> tuple[PlannedPayload, ...]:
    """What a silo's budget must pay for before the first round: this release, where groups are to be found."""
    if config.data.groups != "discover":
        return ()
    share = config.privacy.shares.get(RELEASE, SHARE)
    return (PlannedPayload(RELEASE, statistic(config), (BEFORE,), share, 2 * config.discovery.frequencies),)


def check_private_discovery(config: Config) -> None:
    """Refuse where nobody sees what a single silo sends."""
    if config.data.groups == "discover" and config.privacy.trust == "distributed":
        raise ConfigError(
            "data.groups = 'discover' needs privacy.trust = 'local': silos are told apart by what each of them sends, "
            "and with 'distributed' its noise hides nothing but their sum"
        )


def released(
    config: Config, federation: Federation, privacy: Sequence[SiloPrivacy], secrets: Mapping[int, StreamNoise]
) -> tuple[list[Update], list[EgressRecord]]:
    """What every silo sends, through the egress guard; under a mechanism it must have been charged before."""
    found, updates, egress = statistic(config), [], []
    sums = payload_of_sums(RELEASE, "the sum of a vector of length 1 for each record, once", _features(config).shapes)
    plan = SharingPlan({}, federation.groups, (RECORD_COUNT, sums))
    for index, silo in enumerate(federation.silos):
        noise, units = None, len(silo)
        if privacy:
            unit = unit_numbers(silo, privacy[index].settings.unit)
            noise, units = SumNoise(privacy[index].payload_noise[RELEASE], unit, secrets[index]), privacy[index].units
        key = NoiseKey(index, BEFORE, 0, RELEASE)
        value = found.value(Query(silo.train, nn.Identity(), Streams(config.seed), key, noise))
        update = Update(silo.name, BEFORE, {}, {"all": float(units)}, {RELEASE: value})
        updates.append(update)
        egress.append(pass_egress(update, plan, Site(silo.name, silo.groups), {}))
    return updates, egress


def read(config: Config, updates: Sequence[Update], privacy: Sequence[SiloPrivacy]) -> Found:
    """The server's part: groups by the means of what silos sent, and by how noisy each of them is."""
    points, variances = [], []
    for index, update in enumerate(updates):
        check_update(update, {})
        units = update.counts["all"]
        mean = update.payloads[RELEASE][EMBEDDING].to(torch.float64).numpy() / units
        noise = (privacy[index].payload_noise[RELEASE] / units) ** 2 if privacy else 0.0
        within = max(0.0, 1.0 - max(0.0, float(mean @ mean) - noise * len(mean)))  # records are of length 1
        points.append(mean)
        variances.append(noise + within / units / len(mean))
    how = config.discovery
    return find_groups(np.stack(points), np.array(variances), most=how.most, groups=how.groups, seed=config.seed)
