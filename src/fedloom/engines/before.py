"""What silos release before the first round, and what the server reads from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from fedloom.discovery.clustering import Found
from fedloom.discovery.release import RELEASE, read, read_by_loss
from fedloom.engines.base import Secrets, site_of
from fedloom.engines.charging import privacy_of_silo
from fedloom.engines.training import Trainer
from fedloom.federation.rounds import RoundContext
from fedloom.methods.discovery import with_question
from fedloom.privacy.ledger import BEFORE
from fedloom.privacy.noise import Randomness
from fedloom.sharing.update import EgressRecord, Update, pass_egress

Sent = list[tuple[Update, EgressRecord]]


def context_before(trainer: Trainer) -> RoundContext:
    """All silos, whoever is drawn for the rounds."""
    return RoundContext(BEFORE, trainer.config.rounds, tuple(range(len(trainer.federation))))


def released(
    trainer: Trainer, silo: int, secret: Randomness | None = None, step: int = 0
) -> tuple[Update, EgressRecord]:
    """What a silo sends, through the egress guard; under a mechanism it must have been charged before."""
    site, context = site_of(trainer.federation, silo), context_before(trainer)
    update = Update(site.name, BEFORE, {}, trainer.counts(silo), trainer.payloads(silo, {}, context, secret, step))
    return update, pass_egress(update, trainer.method.plan, site, {})


def simulated(trainer: Trainer, secrets: Secrets) -> tuple[Sent, Found]:
    """What all silos of a simulation send, and the groups that follow from it."""
    silos, sent = range(len(trainer.federation)), list[tuple[Update, EgressRecord]]()

    def asked(bases: Tensor) -> Sequence[Update]:
        asking, step = replace(trainer, method=with_question(trainer.method, trainer.config, bases)), len(sent)
        answers = [released(asking, silo, secrets.get(silo), step // len(silos)) for silo in silos]
        sent.extend(answers)
        return [update for update, _ in answers]

    if trainer.config.discovery.by == "loss":
        return sent, read_by_loss(trainer.config, asked, partial(_noises, trainer))
    sent += [released(trainer, silo, secrets.get(silo)) for silo in silos]
    return sent, found_groups(trainer, [update for update, _ in sent])


def found_groups(trainer: Trainer, updates: Sequence[Update]) -> Found:
    """By what all silos sent, in their order."""
    return read(trainer.config, updates, _noises(trainer, updates))


def _noises(trainer: Trainer, updates: Sequence[Update]) -> list[float]:
    """How noisy what each silo sends is: it follows from public numbers."""
    if trainer.config.privacy.mechanism == "none":
        return [0.0] * len(updates)
    plans = (
        privacy_of_silo(trainer.config, trainer.method, update.silo, int(update.counts["all"]), rounds)
        for update, rounds in zip(updates, trainer.attended, strict=True)
    )
    return [plan.payload_noise[RELEASE] for plan in plans]
