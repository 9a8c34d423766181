"""What a silo states of a run: from its own ledger and its own record of what left, and from nobody else's word."""

from __future__ import annotations

import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import fedloom
from fedloom.config import Config
from fedloom.engines.remote.work import RUN, RefusedError, refused
from fedloom.errors import ConfigError
from fedloom.federation.records import Federation
from fedloom.privacy.accounting import default_delta
from fedloom.privacy.accounts import ChargedRelease
from fedloom.privacy.ledger import Ledger
from fedloom.privacy.silo_privacy import number_of_units
from fedloom.privacy.statement_body import GrantedBudget, StatementBody, accountant_for, drawn_rounds
from fedloom.privacy.statements import Bundle
from fedloom.runs.folder import RunFolder
from fedloom.settings import parse


def words_of(bundle: Bundle, federation: Federation, index: int, home: Path) -> dict[str, Any]:
    """The words for a silo's node to sign; a run in which the silo had no part cost nothing."""
    silo = federation.silos[index]
    with refused():
        config = _experiment(bundle)
    left = _left(bundle, config, home / "runs" / bundle.run, silo.name)
    charges, granted = _paid(home / "ledger.sqlite", bundle.run, silo.name)
    drawn = drawn_rounds(config, [each.name for each in federation.silos])[silo.name]
    unit, units = config.privacy.unit, number_of_units(silo, config.privacy.unit)
    body = StatementBody(
        **bundle.terms,
        silo=silo.name,
        mechanism=config.privacy.mechanism,
        unit=unit,
        units=units,
        granted=granted,
        charges=tuple(charges),
        left=tuple(left),
        version=fedloom.__version__,
    )
    if config.privacy.mechanism != "none":
        accountant = accountant_for(charges, drawn)
        delta = granted.delta if accountant == "filter" else config.privacy.delta or default_delta(units)
        body = replace(body, accountant=accountant, delta=delta)
    return replace(body, epsilon=body.counted).to_mapping()


def _experiment(bundle: Bundle) -> Config:
    if not RUN.fullmatch(bundle.run):
        raise ConfigError(f"run = '{bundle.run}' must be small letters, digits and '-', at most 63")
    try:
        return parse(Config, tomllib.loads(bundle.experiment))
    except ValueError as error:
        raise ConfigError(f"the experiment is not valid TOML: {error}") from error


def _left(bundle: Bundle, config: Config, folder: Path, silo: str) -> list[dict[str, Any]]:
    """The silo's own record of what left; the server cannot have taken anything else from it."""
    known = RunFolder.open(folder) if folder.is_dir() else None
    if known is not None and known.config.digest() != config.digest():
        raise RefusedError(f"silo '{silo}' knows run '{bundle.run}' as another experiment")
    rows = known.egress() if known else []
    left = {(str(row["round"]), row["sha256"]) for row in rows}
    for number, came in bundle.participants.items():
        if silo in came and (number, came[silo]) not in left:
            raise RefusedError(f"silo '{silo}' sent nothing in round {number} of what the server says that it took")
    return rows


def _paid(path: Path, run: str, silo: str) -> tuple[list[ChargedRelease], GrantedBudget]:
    if not path.is_file():
        return [], GrantedBudget()
    with closing(Ledger(path)) as ledger:
        budget = ledger.budget_of(silo)
        granted = GrantedBudget(budget.epsilon, budget.delta) if budget else GrantedBudget()
        return ledger.charges(run, silo), granted
