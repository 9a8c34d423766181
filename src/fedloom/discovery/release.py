"""The release by which silos are grouped: what it is, what it costs, and what the server reads from all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.config import Config
from fedloom.discovery.branches import (
    ANSWER,
    QUESTIONS,
    RANK,
    RESTARTS,
    Explained,
    OneOfSeveral,
    first_bases,
    found_by_loss,
    search,
)
from fedloom.discovery.clustering import Found, find_groups
from fedloom.discovery.features import EMBEDDING, FourierFeatures
from fedloom.errors import ConfigError
from fedloom.privacy.payload_sums import BoundedSum, Statistic
from fedloom.sharing.plan import Payload, payload_of_sums
from fedloom.sharing.update import Update, check_update
from fedloom.streams import Streams

RELEASE = "discovery"
SHARE = 0.1  # of the budget


def statistic(config: Config, bases: Tensor | None = None) -> Statistic:
    """The sum of what a silo's records add; one more or less moves it by at most 1.

    By the loss it answers one of several questions, which is about ``bases``.
    """
    if config.discovery.by == "moments":
        return BoundedSum(_features(config))
    return OneOfSeveral(BoundedSum(Explained(_features(config), _first(config) if bases is None else bases)))


def payload(config: Config) -> Payload:
    """What leaves a silo before the first round."""
    if config.discovery.by == "moments":
        what = "the sum of a vector of length 1 for each record, once"
        return payload_of_sums(RELEASE, what, _features(config).shapes)
    what = f"the sum of a matrix of length 1 at most for each record, {QUESTIONS} times"
    return payload_of_sums(RELEASE, what, {ANSWER: tuple(_first(config).shape)})


def _features(config: Config) -> FourierFeatures:
    return FourierFeatures(config.discovery.frequencies, config.seed)


def _restarts(config: Config) -> int:
    """One where each makes the noise larger."""
    return RESTARTS if config.privacy.mechanism == "none" else 1


def _generator(config: Config) -> torch.Generator:
    return torch.Generator().manual_seed(Streams(config.seed).torch_seed("discovery/branches"))


def _first(config: Config) -> Tensor:
    values = 2 * config.discovery.frequencies
    return first_bases(values, config.discovery.groups, _restarts(config), _generator(config))


def check_discovery(config: Config) -> None:
    """Refuse what no silo can answer, and where nobody sees what a single silo sends."""
    if config.discovery.by == "loss" and config.discovery.groups < 2:
        raise ConfigError(
            f"discovery.by = 'loss' needs discovery.groups of at least 2, the number of branches; it is "
            f"{config.discovery.groups}"
        )
    if config.privacy.mechanism != "none" and config.privacy.trust == "distributed":
        raise ConfigError(
            "data.groups = 'discover' needs privacy.trust = 'local': silos are told apart by what each of them sends, "
            "and with 'distributed' its noise hides nothing but their sum"
        )


Asked = Callable[[Tensor], Sequence[Update]]  # bases -> the answers of all silos
Noises = Callable[[Sequence[Update]], Sequence[float]]


def read_by_loss(config: Config, asked: Asked, noises: Noises) -> Found:
    """The same where silos answer several questions."""
    last: list[tuple[Sequence[Update], float]] = []

    def ask(bases: Tensor) -> list[Tensor]:
        updates, scale = asked(bases), Explained(_features(config), bases).scale
        for update in updates:
            check_update(update, {})
        last[:] = [(updates, scale)]
        return [update.payloads[RELEASE][ANSWER].double() / scale / update.counts["all"] for update in updates]

    how = config.discovery
    losses = search(ask, _first(config), how.groups, _restarts(config), _generator(config))
    ((updates, scale),) = last
    units = torch.tensor([update.counts["all"] for update in updates], dtype=torch.float64)
    deviations = torch.tensor(noises(updates), dtype=torch.float64) * math.sqrt(QUESTIONS) / scale / units
    return found_by_loss(losses, deviations * math.sqrt(RANK), units)  # of a basis of that length


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
