"""What silos release before the first round, and what the server reads from it."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.discovery.clustering import Found
from fedloom.discovery.release import RELEASE, read
from fedloom.engines.base import site_of
from fedloom.engines.charging import privacy_of_silo
from fedloom.engines.training import Trainer
from fedloom.federation.rounds import RoundContext
from fedloom.privacy.ledger import BEFORE
from fedloom.privacy.noise import Randomness
from fedloom.sharing.update import EgressRecord, Update, pass_egress


def context_before(trainer: Trainer) -> RoundContext:
    """All silos, whoever is drawn for the rounds."""
    return RoundContext(BEFORE, trainer.config.rounds, tuple(range(len(trainer.federation))))


def released(trainer: Trainer, silo: int, secret: Randomness | None = None) -> tuple[Update, EgressRecord]:
    """What a silo sends, through the egress guard; under a mechanism it must have been charged before."""
    site, context = site_of(trainer.federation, silo), context_before(trainer)
    update = Update(site.name, BEFORE, {}, trainer.counts(silo), trainer.payloads(silo, {}, context, secret))
    return update, pass_egress(update, trainer.method.plan, site, {})


def found_groups(trainer: Trainer, updates: Sequence[Update]) -> Found:
    """By what all silos sent, in their order: how noisy each is follows from public numbers."""
    return read(trainer.config, updates, [_noise(trainer, index, update) for index, update in enumerate(updates)])


def _noise(trainer: Trainer, silo: int, update: Update) -> float:
    if trainer.config.privacy.mechanism == "none":
        return 0.0
    units, rounds = int(update.counts["all"]), trainer.attended[silo]
    return privacy_of_silo(trainer.config, trainer.method, update.silo, units, rounds).payload_noise[RELEASE]
