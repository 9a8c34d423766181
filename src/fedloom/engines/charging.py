"""What a simulated run owes its silos: what it will spend, known before it starts, and a ledger charged before work."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedloom.config import Config
from fedloom.engines.base import FederationState, SiloState, participants_of, pretraining_phases
from fedloom.engines.distributed import shared_noise
from fedloom.engines.training import Trainer, local_steps
from fedloom.errors import ConfigError, FedloomWarning, unknown
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Method, Phase
from fedloom.privacy.accounts import Chain
from fedloom.privacy.ledger import BEFORE, PRETRAINING, BudgetSpentError, Ledger
from fedloom.privacy.noise import StreamNoise, keyed
from fedloom.privacy.silo_privacy import PlannedPayload, SiloPrivacy, check_settings, number_of_units
from fedloom.sharing.plan import Tensors


def privacy_of_silos(
    config: Config, federation: Federation, method: Method, participants: Sequence[tuple[int, ...]]
) -> tuple[SiloPrivacy, ...]:
    """What each silo's data will be used for under DP-SGD, else nothing; ``participants`` are those of every round."""
    if config.privacy.mechanism == "none":
        return ()
    names = [silo.name for silo in federation.silos]
    check_settings(config.privacy)
    for name in config.privacy.budgets:
        if name not in names:
            raise ConfigError("privacy.budgets: " + unknown("silo", name, names))
    for block in config.privacy.blocks:
        if block not in method.plan.blocks:
            raise ConfigError("privacy.blocks: " + unknown("block", block, method.plan.blocks))
    shareable = [rule.name for rule in method.payloads] + [PRETRAINING] * bool(config.privacy.pretraining)
    for name in config.privacy.shares:
        if name not in shareable:
            raise ConfigError("privacy.shares: " + unknown("payload", name, shareable))
    if config.privacy.pretraining and not _private(pretraining_phases(method)):
        raise ConfigError(
            f"privacy.pretraining = {config.privacy.pretraining} needs a trained block that nothing comes down for, "
            f"and method '{method.name}' has none; give one scope 'silo' or 'upload' in sharing.scopes"
        )
    privacies = []
    for index, silo in enumerate(federation.silos):
        units = number_of_units(silo, config.privacy.unit)
        rounds = tuple(number for number, chosen in enumerate(participants, start=1) if index in chosen)
        privacies.append(privacy_of_silo(config, method, silo.name, units, rounds))
    for privacy in privacies:
        # Complains of what cannot be had before a run folder exists.
        _ = privacy.budget, privacy.noise, privacy.payload_noise
    if config.privacy.trust == "distributed":
        return shared_noise(config, federation, method, privacies)
    return tuple(privacies)


def shares_noise(config: Config) -> bool:
    """Whether an experiment's silos add but shares of the noise."""
    return config.privacy.mechanism != "none" and config.privacy.trust == "distributed"


def own_plan(
    config: Config, federation: Federation, method: Method, units: Mapping[str, int], index: int
) -> SiloPrivacy:
    """A silo's own among :func:`shared_plans`; what was declared must suffice for what it really holds."""
    public, silo = shared_plans(config, federation, method, units)[index], federation.silos[index]
    found = replace(public, units=number_of_units(silo, config.privacy.unit))
    if (found.noise, found.payload_noise) != (public.noise, public.payload_noise):
        raise ConfigError(
            f"silo '{silo.name}' needs more noise than follows from the records that the charter declares for it"
        )
    return found


def shared_plans(
    config: Config, federation: Federation, method: Method, units: Mapping[str, int]
) -> tuple[SiloPrivacy, ...]:
    """For silos that share noise across machines: from the numbers of records that their charter declares for all."""
    if missing := [silo.name for silo in federation.silos if silo.name not in units]:
        raise ConfigError(
            "privacy.trust = 'distributed' takes the records of every silo in the charter, for the noise follows from "
            f"them, and those of '{missing[0]}' are not declared"
        )
    check_settings(config.privacy)
    drawn = {round: participants_of(config, federation, round) for round in range(1, config.rounds + 1)}
    privacies = [
        privacy_of_silo(
            config, method, silo.name, units[silo.name], tuple(r for r, chosen in drawn.items() if i in chosen)
        )
        for i, silo in enumerate(federation.silos)
    ]
    return shared_noise(config, federation, method, privacies)


def privacy_of_silo(config: Config, method: Method, silo: str, units: int, rounds: tuple[int, ...]) -> SiloPrivacy:
    """For one silo: whoever knows its public number of units can make it."""
    if staged := [phase.name for phase in method.phases if phase.first > 1 or phase.last]:
        raise ConfigError(
            f"method '{method.name}' trains '{staged[0]}' in some rounds only, which DP-SGD and its accounts do not "
            "know; use privacy.mechanism = 'none'"
        )
    private = _private(method.phases)
    trained = {block for phase in private for block in phase.trains}
    whole = trained <= set(config.privacy.blocks)
    settings = replace(config.privacy, blocks=()) if whole else config.privacy
    payloads = tuple(
        PlannedPayload(
            rule.name,
            rule.statistic,
            rule.rounds(rounds),
            settings.shares.get(rule.name, rule.share),
            sum(math.prod(shape) for shape in rule.payload.shapes.values()),
        )
        for rule in method.payloads
    )
    steps = len(private) * local_steps(config, units)
    before = len(_private(pretraining_phases(method)))
    privacy = SiloPrivacy(silo, units, rounds, steps, config.local.batch_size, settings, payloads)
    return replace(privacy, pretraining=before * settings.pretraining)


def _private(phases: Iterable[Phase]) -> list[Phase]:
    """The phases that look at records, and so need noise."""
    return [phase for phase in phases if phase.touches_records]


def noise_source(choice: Mapping[str, Any]) -> str:
    """Where an engine's noise comes from; empty where the seed alone determines it.

    An accelerator draws with a generator of its own, and its model decides where in a tensor each number goes: so
    another device gives other noise. Another precision must: with equal noise, the difference of what two releases say
    of the records would have none.
    """
    device = choice.get("device", "cpu")
    return "" if device == "cpu" else f"/{device}/{choice.get('gpu', '')}/{choice.get('precision', '')}"


class Charging:
    """The ledger of a run, who may take part in a round, and what hides their records in it."""

    def __init__(self, trainer: Trainer, path: Path, secret: bytes | None) -> None:
        """``secret`` is the run's own; None where noise is to come from the seed."""
        self._trainer, self._secret = trainer, secret
        self._ledger = Ledger(path)
        for privacy, silo in zip(trainer.privacy, trainer.federation.silos, strict=True):
            self._ledger.enrol(silo.name, silo.digest, privacy.budget)

    def admitted_before(self) -> dict[int, StreamNoise]:
        """The secrets of all silos for what they release before the first round; all of them have paid by then."""
        silos = self._trainer.federation.silos
        given = {index: silo.digest for index, silo in enumerate(silos)}
        paid = self._pay(BEFORE, "", given)
        if missing := [silo.name for index, silo in enumerate(silos) if index not in paid]:
            raise BudgetSpentError(f"silo '{missing[0]}' cannot pay for what it would release before the first round")
        return {index: self._keyed(BEFORE, index, "", given[index]) for index in paid}

    def admitted(
        self, state: FederationState, context: RoundContext, source: str = ""
    ) -> tuple[RoundContext, dict[int, StreamNoise]]:
        """The round with those silos whose budget pays for it, and their secrets; all of them have paid by then.

        A round that is done again with noise of another ``source`` is paid for again.
        """
        silos = self._trainer.federation.silos
        server = _digest({f"{key}/{name}": t for key, part in state.server.blocks.items() for name, t in part.items()})
        kept = {index: _digest(state.silos.get(index, SiloState()).tensors) for index in context.participants}
        given = {i: f"{silos[i].digest}/{server}/{own}" for i, own in kept.items()}
        paid = self._pay(context.round, source, given)
        if missing := self._too_few(context, len(paid)):
            warnings.warn(missing, FedloomWarning, stacklevel=2)
            paid = []
        secrets = {index: self._keyed(context.round, index, source, given[index]) for index in paid}
        return replace(context, participants=tuple(paid)), secrets

    def _keyed(self, round: int, silo: int, source: str, given: str) -> StreamNoise:
        """The coins and noise of a query: the same query has the same, and no other shares any."""
        if self._secret is None:
            return self._trainer.seeded
        query = {"experiment": self._experiment(source), "round": round, "silo": silo, "given": given}
        return keyed(self._secret, json.dumps(query))

    def _experiment(self, source: str) -> str:
        return self._trainer.config.digest() + source

    def _pay(self, round: int, source: str, inputs: Mapping[int, str]) -> list[int]:
        """Charge silos for what they release from these ``inputs``; returns those whose budget allows it."""
        run, paid = self._experiment(source), list[int]()
        secret = hashlib.sha256(self._secret or b"").hexdigest()
        for index, given in inputs.items():
            privacy, silo = self._trainer.privacy[index], self._trainer.federation.silos[index]
            # All that determines the release, with where its noise comes from: doing it again is the same one.
            content = hashlib.sha256(f"{run}/{secret}/{given}".encode()).hexdigest()
            try:
                self._ledger.charge_all(run, silo.name, round, privacy.events(round), content=content)
            except BudgetSpentError as error:
                warnings.warn(str(error), FedloomWarning, stacklevel=3)
                continue
            paid.append(index)
        return paid

    def _too_few(self, context: RoundContext, present: int) -> str:
        """Why those present may not go on without the others; empty if they may."""
        absent, tolerated = len(context.participants) - present, self._trainer.config.privacy.tolerated
        if self._trainer.config.privacy.trust == "local" or absent <= tolerated:
            return ""
        return (
            f"nobody takes part in round {context.round}: {absent} silos are missing, and without their noise that of "
            f"the others protects nobody (privacy.tolerated = {tolerated})"
        )

    def metrics(self) -> dict[str, float]:
        """The epsilon spent so far by the silo that has spent most; nothing where no epsilon holds."""
        spent = max(account.spent for account in self._ledger.accounts())
        return {"privacy/epsilon/max": spent} if math.isfinite(spent) else {}

    def chain(self) -> Chain:
        """All charges so far."""
        return self._ledger.chain()

    def close(self) -> None:
        """Close the ledger's file, so that another process may charge."""
        self._ledger.close()


def _digest(tensors: Tensors) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}/{tensor.dtype}/{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
