"""The stage before the first round, where groups are to be found that nobody named."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from fedloom.config import Config
from fedloom.discovery.clustering import Found
from fedloom.discovery.grouping import check_unnamed, names_of, unnamed
from fedloom.discovery.release import read, released
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


def find(experiment: Experiment, folder: RunFolder) -> dict[str, str]:
    """The group of every silo: as it stands in the folder, or found now, once and for all, and written there."""
    known = folder.discovery
    if known is None:
        known = _found(experiment, folder)
        folder.record_discovery(known)
    return known.groups


def _found(experiment: Experiment, folder: RunFolder) -> Discovery:
    config, federation, trainer = experiment.config, experiment.federation, experiment.trainer
    secrets = {}
    if trainer.privacy:
        charging = Charging(trainer, folder.ledger, None if config.privacy.noise == "test" else folder.secret())
        try:
            folder.note({LEDGER: charging.chain().ledger})
            secrets = charging.admitted_before()
        finally:
            charging.close()
    updates, egress = released(config, federation, trainer.privacy, secrets)
    folder.record_before([record.to_mapping() for record in egress])
    told = _told(read(config, updates, trainer.privacy), federation, asked=config.discovery.groups > 0)
    if len(set(told.groups.values())) == 1 and not told.asked:
        warnings.warn(f"{told.sentence}; all silos go on as one", FedloomWarning, stacklevel=4)
    return told


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
