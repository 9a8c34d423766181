"""The one release by which silos are grouped: what it is, what it costs, and what the server reads from all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedloom.config import Config
from fedloom.discovery.clustering import Found, find_groups
from fedloom.discovery.features import EMBEDDING, FourierFeatures
from fedloom.errors import ConfigError
from fedloom.privacy.payload_sums import BoundedSum
from fedloom.sharing.plan import Payload, payload_of_sums
from fedloom.sharing.update import Update, check_update

RELEASE = "discovery"
SHARE = 0.1  # of the budget


def statistic(config: Config) -> BoundedSum:
    """The sum of what a silo's records add; one more or less moves it by at most 1."""
    return BoundedSum(_features(config))


def payload(config: Config) -> Payload:
    """What leaves a silo, once."""
    return payload_of_sums(RELEASE, "the sum of a vector of length 1 for each record, once", _features(config).shapes)


def _features(config: Config) -> FourierFeatures:
    return FourierFeatures(config.discovery.frequencies, config.seed)


def check_private_discovery(config: Config) -> None:
    """Refuse where nobody sees what a single silo sends."""
    if config.privacy.mechanism != "none" and config.privacy.trust == "distributed":
        raise ConfigError(
            "data.groups = 'discover' needs privacy.trust = 'local': silos are told apart by what each of them sends, "
            "and with 'distributed' its noise hides nothing but their sum"
        )


def read(config: Config, updates: Sequence[Update], noises: Sequence[float]) -> Found:
    """The server's part: groups by the means of what silos sent, and by how noisy each of them is.

    ``noises`` are the standard deviations of the noise in each silo's sum, 0 where there is none.
    """
    points, variances = [], []
    for update, deviation in zip(updates, noises, strict=True):
        check_update(update, {})
        units = update.counts["all"]
        mean = update.payloads[RELEASE][EMBEDDING].to(torch.float64).numpy() / units
        noise = (deviation / units) ** 2
        within = max(0.0, 1.0 - max(0.0, float(mean @ mean) - noise * len(mean)))  # records are of length 1
        points.append(mean)
        variances.append(noise + within / units / len(mean))
    how = config.discovery
    return find_groups(np.stack(points), np.array(variances), most=how.most, groups=how.groups, seed=config.seed)
