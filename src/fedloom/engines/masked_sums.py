"""What silos add up in a round under secure aggregation: all that the plan sends, as one vector of whole numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fedloom.config import Config
from fedloom.engines.base import FederationState, SharedStep, received_by, site_of
from fedloom.engines.charging import shared_plans
from fedloom.engines.private_training import parameters_of
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Method, some_model
from fedloom.methods.steps import ServerRound, Stepped
from fedloom.privacy.grids import Grid
from fedloom.privacy.ledger import UPDATE
from fedloom.privacy.silo_privacy import SiloPrivacy
from fedloom.secure.terms import Terms
from fedloom.secure.words import Integers, Ring
from fedloom.sharing.codec import SLOT, flat, parts
from fedloom.sharing.plan import BlockKey, SharingPlan, Tensors
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

    @property
    def step(self) -> SharedStep | None:
        """The step that is taken with the sum, in which gradients leave."""
        return SharedStep(self.grids[UPDATE], self.shapes[UPDATE]) if UPDATE in self.shapes else None

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
        for payload, tensors in sorted(self.shapes.items()):
            for name, shape in sorted(tensors.items()):
                yield payload, name, shape


@dataclass(frozen=True)
class SummedRounds:
    """What silos add up in each round of a run, as every silo's ``plan`` gives it alike."""

    config: Config
    federation: Federation
    method: Method
    plan: SiloPrivacy

    @classmethod
    def declared(
        cls, config: Config, federation: Federation, method: Method, records: Mapping[str, int]
    ) -> SummedRounds:
        """By the most records that each silo declared."""
        return cls(config, federation, method, shared_plans(config, federation, method, records)[0])

    def of(self, round: int) -> MaskedSum:
        """The sum of a round."""
        owners = ("all", *(f"group={group}" for group in self.federation.groups))
        due = {each.name for each in self.plan.payloads if round in each.rounds}
        shapes = {payload.name: payload.shapes for payload in self.method.plan.payloads if payload.name in due}
        grids = {name: self.plan.grids[name] for name in shapes}
        if self.gradients:
            size = sum(math.prod(shape) for shape in self.gradients.values())
            shapes[UPDATE], grids[UPDATE] = self.gradients, self.plan.update_grid(round, size)
        return MaskedSum(owners, shapes, grids, self.config.privacy.bits)

    @cached_property
    def gradients(self) -> dict[str, tuple[int, ...]]:
        """Of the round's one step, where there is one, for every group's copy of every block."""
        found: dict[str, tuple[int, ...]] = {}
        for phase in self.method.phases:  # one: whoever shares noise has no others
            for silo in one_of_each_kind(self.federation):
                site = site_of(self.federation, silo)
                trained = parameters_of(phase, some_model(self.method, site))
                copies = flat("", self.method.plan.split(trained, site), SLOT)
                found |= {name: tuple(tensor.shape) for name, tensor in copies.items()}
        return dict(sorted(found.items()))


def one_of_each_kind(federation: Federation) -> list[int]:
    """Silos of which each stands for all of the same groups, whose shared blocks are the same."""
    silos = federation.silos
    return sorted({silos[index].groups: index for index in reversed(range(len(silos)))}.values())


def stepped_by(
    trainer: Trainer, method: Method, total: Update, state: FederationState, context: RoundContext
) -> Stepped:
    """The server's step, which is shown the sum of all that the participants sent."""
    merged = _merged(trainer, method.plan, total, state, context) if UPDATE in total.payloads else {}
    server, streams = state.server, trainer.streams
    return method.server_step(ServerRound(server, server, merged, [total], context, streams, torch.device("cpu")))


def _merged(
    trainer: Trainer, plan: SharingPlan, total: Update, state: FederationState, context: RoundContext
) -> dict[BlockKey, Tensors]:
    """What the mean over those who have a copy would be, had each taken the step with its own part of the sum."""
    there = [site_of(trainer.federation, silo) for silo in context.participants]
    counts = Counter(key for site in there for block in plan.merged for key in plan.prefixes(block, site).values())
    sums = parts("", total.payloads[UPDATE], BlockKey.of, SLOT)
    means = {key: {name: each / counts[key] for name, each in part.items()} for key, part in sums.items()}
    merged: dict[BlockKey, Tensors] = {}
    for silo in one_of_each_kind(trainer.federation):
        site = site_of(trainer.federation, silo)
        received = received_by(plan, state.server, site)
        weights = trainer.step_by(silo, received, plan.join(means, site), context)
        merged |= {key: part for key, part in plan.split(weights, site).items() if key.block in plan.merged}
    return merged


def check_shared(config: Config, federation: Federation, method: Method, records: Mapping[str, int]) -> None:
    """Refuse, before anybody is asked, an experiment whose silos cannot share noise."""
    threshold_of(len(federation), config.privacy.tolerated)
    rounds = SummedRounds.declared(config, federation, method, records)
    for round in range(1, config.rounds + 1):
        rounds.of(round)


def terms_of(
    config: Config, silos: Sequence[str], run: str, context: RoundContext, attempt: str, summed: MaskedSum
) -> Terms:
    """What all agree on: nothing of it depends on who says it."""
    session = f"{run}/{config.digest()}/{context.round}/{attempt}"
    return Terms(session, tuple(silos), threshold_of(len(silos), config.privacy.tolerated), summed.ring)
