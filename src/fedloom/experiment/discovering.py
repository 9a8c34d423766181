"""The stage before the first round, where groups are to be found that nobody named."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from fedloom.config import Config
from fedloom.discovery.clustering import Found
from fedloom.discovery.grouping import check_unnamed, names_of, unnamed
from fedloom.engines.base import NO_SECRETS, AskingEngine, Engine, Secrets, initial_state
from fedloom.engines.before import Sent, found_groups, simulated
from fedloom.engines.charging import Charging
from fedloom.errors import ConfigError, FedloomWarning
from fedloom.federation.records import Federation
from fedloom.methods.base import Method
from fedloom.runs.discoveries import Discovery, FoundSilo
from fedloom.runs.folder import RunFolder
from fedloom.runs.ledgers import LEDGER
from fedloom.sharing.plan import Scope

if TYPE_CHECKING:
    from fedloom.experiment.experiment import Experiment


def to_be_found(config: Config, federation: Federation) -> Federation:
    """The federation before its groups are known, where they can be found."""
    if federation.is_remote and config.discovery.by == "loss":
        raise ConfigError(
            "discovery.by = 'loss' asks silos several times before the first round, which is for simulations; in a "
            "deployment use 'moments'"
        )
    if config.data.layout == "centralised":
        raise ConfigError("data.groups = 'discover' needs data.layout = 'federated': a single silo has no groups")
    check_unnamed(federation, config.discovery.groups)
    return unnamed(federation)


def check_scope(method: Method) -> None:
    """Refuse a method for which groups are nothing."""
    if all(rule.scope is not Scope.GROUP for rule in method.plan.blocks.values()):
        raise ConfigError(
            f"data.groups = 'discover' needs a block of scope 'group', and method '{method.name}' has none: take "
            "'fissionvae', or give a block that scope in sharing.scopes"
        )


def groups_of(folder: RunFolder) -> dict[str, str] | None:
    """The group of every silo, where groups were to be found and have been."""
    known = folder.discovery if folder.config.data.groups == "discover" else None
    return None if known is None else known.groups


def find(experiment: Experiment, folder: RunFolder, engine: Engine | None) -> dict[str, str]:
    """The group of every silo: as it stands in the folder, or found now, once and for all, and written there."""
    known = folder.discovery
    if known is None:
        known = _found(experiment, folder, engine)
        folder.record_discovery(known)
    return known.groups


def _found(experiment: Experiment, folder: RunFolder, engine: Engine | None) -> Discovery:
    config, federation = experiment.config, experiment.federation
    if isinstance(engine, AskingEngine):
        sent, found = _asked(experiment, folder, engine)
    else:
        sent, found = simulated(experiment.trainer, _charged(experiment, folder))
    folder.rewind(-1, logs=("egress.jsonl",))  # what a stopped attempt may have logged
    folder.record_before([record.to_mapping() for _, record in sent])
    told = _told(found, federation, asked=config.discovery.groups > 0)
    if len(set(told.groups.values())) == 1 and not told.asked:
        warnings.warn(f"{told.sentence}; all silos go on as one", FedloomWarning, stacklevel=4)
    return told


def _asked(experiment: Experiment, folder: RunFolder, engine: AskingEngine) -> tuple[Sent, Found]:
    """By silos that are elsewhere, each of which charges its own ledger."""
    folder.note({"engine": engine.describe(), "engine_choice": engine.choice()})  # whoever resumes asks for the same
    state = initial_state(experiment.method, experiment.federation, experiment.config)
    sent = [(result.update, result.egress) for result in engine.before(state)]
    return sent, found_groups(experiment.trainer, [update for update, _ in sent])


def _charged(experiment: Experiment, folder: RunFolder) -> Secrets:
    """What hides the records of each silo of a simulation, all of which have paid by then."""
    config, trainer = experiment.config, experiment.trainer
    if not trainer.privacy:
        return NO_SECRETS
    charging = Charging(trainer, folder.ledger, None if config.privacy.noise == "test" else folder.secret())
    try:
        folder.note({LEDGER: charging.chain().ledger})
        return charging.admitted_before()
    finally:
        charging.close()


def _told(found: Found, federation: Federation, *, asked: bool) -> Discovery:
    names = names_of(1 + max(found.labels))
    silos = {
        silo.name: FoundSilo(
            names[found.labels[index]],
            dict(zip(names, found.odds[index].tolist(), strict=True)),
            tuple(found.places[index].tolist()),
            found.error[index],
        )
        for index, silo in enumerate(federation.silos)
    }
    return Discovery(silos, found.directions, found.chance, asked)
