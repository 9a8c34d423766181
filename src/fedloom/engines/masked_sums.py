"""What silos add up in a round under secure aggregation: all that the plan sends, as one vector of whole numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedloom.config import Config
from fedloom.engines.base import site_of
from fedloom.engines.charging import shared_plans
from fedloom.engines.private_training import parameters_of
from fedloom.errors import ConfigError
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Method, some_model
from fedloom.privacy.grids import Grid
from fedloom.privacy.ledger import UPDATE
from fedloom.privacy.silo_privacy import SiloPrivacy
from fedloom.secure.terms import Terms
from fedloom.secure.words import Integers, Ring
from fedloom.sharing.plan import Tensors
from fedloom.sharing.update import EgressRecord, Update


def threshold_of(silos: int, tolerated: int) -> int:
    """How many must stay: all but those that may drop out or collude, in one sum and no other.

    Of two sums of one round each would need so many signatures, and colluders may give theirs twice.
    """
    if 3 * tolerated >= silos:
        raise ConfigError(
            f"privacy.tolerated = {tolerated} of {silos} silos: it must be below a third of them, or the server and "
            "those that collude could take two sums from one round"
        )
    return silos - tolerated


@dataclass(frozen=True)
class MaskedSum:
    """Numbers of records of each owner, then payloads, tensor by tensor."""

    owners: tuple[str, ...]  # "all" and every group
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]  # payload -> tensor -> shape
    grids: Mapping[str, Grid]
    bits: int

    @property
    def ring(self) -> Ring:
        """In which all silos' numbers are added up."""
        sizes = (math.prod(shape) for parts in self.shapes.values() for shape in parts.values())
        return Ring(len(self.owners) + sum(sizes), self.bits)

    def integers(self, update: Update) -> Integers:
        """A silo's update, whose payloads lie on their grids."""
        parts = [np.array([update.counts.get(owner, 0.0) for owner in self.owners])]
        for payload, name, _ in self._tensors():
            values = update.payloads[payload][name].to(torch.float64).flatten().numpy()
            parts.append(np.ldexp(values, self.grids[payload].exponent))
        return np.concatenate(parts).astype(np.int64)

    def update(self, total: Integers, round: int) -> Update:
        """What the server sees: the sum, as of a silo 'all'."""
        counts = {owner: float(count) for owner, count in zip(self.owners, total, strict=False) if count}
        payloads: dict[str, Tensors] = {}
        start = len(self.owners)
        for payload, name, shape in self._tensors():
            values = self.grids[payload].values(total[start : start + math.prod(shape)])
            payloads.setdefault(payload, {})[name] = values.reshape(shape).to(torch.float32)
            start += math.prod(shape)
        return Update("all", round, {}, counts, payloads)

    def egress(self, round: int, silo: str, size: int, sha256: str) -> EgressRecord:
        """What left a silo: the shapes of what is summed, and bytes that say nothing by themselves."""
        payloads = {"records": {}, **{name: dict(parts) for name, parts in self.shapes.items()}}
        return EgressRecord(round, silo, {}, payloads, size, sha256, masked=True)

    def _tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        for payload, parts in sorted(self.shapes.items()):
            for name, shape in sorted(parts.items()):
                yield payload, name, shape


def masked_sum(config: Config, federation: Federation, method: Method, plan: SiloPrivacy, round: int) -> MaskedSum:
    """The sum of a round, as every silo's plan gives it alike."""
    owners = ("all", *(f"group={group}" for group in federation.groups))
    if method.phases:  # one, of one step: whoever shares noise has no others
        model = some_model(method, site_of(federation, 0))
        gradients = {name: tuple(each.shape) for name, each in parameters_of(method.phases[0], model).items()}
        grid = plan.update_grid(round, sum(math.prod(shape) for shape in gradients.values()))
        return MaskedSum(owners, {UPDATE: gradients}, {UPDATE: grid}, config.privacy.bits)
    due = {each.name for each in plan.payloads if round in each.rounds}
    shapes = {payload.name: payload.shapes for payload in method.plan.payloads if payload.name in due}
    return MaskedSum(owners, shapes, {name: plan.grids[name] for name in shapes}, config.privacy.bits)


def check_shared(config: Config, federation: Federation, method: Method, records: Mapping[str, int]) -> None:
    """Refuse, before anybody is asked, an experiment whose silos cannot share noise."""
    threshold_of(len(federation), config.privacy.tolerated)
    plan = shared_plans(config, federation, method, records)[0]
    for round in range(1, config.rounds + 1):
        masked_sum(config, federation, method, plan, round)


def terms_of(
    config: Config, silos: Sequence[str], run: str, context: RoundContext, attempt: str, summed: MaskedSum
) -> Terms:
    """What all agree on: nothing of it depends on who says it."""
    session = f"{run}/{config.digest()}/{context.round}/{attempt}"
    return Terms(session, tuple(silos), threshold_of(len(silos), config.privacy.tolerated), summed.ring)
