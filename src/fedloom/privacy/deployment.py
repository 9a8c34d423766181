"""What a deployment asks of privacy beyond a simulation.

A silo keeps one ledger for its data, outside of run folders, with a budget that its operator grants over all runs. Runs
are chosen after looking at earlier ones, so that budget is held by a privacy filter. Coins and noise come from the
operating system (:func:`fedloom.privacy.noise.deployment_noise`, given to a trainer as ``secret``); a round that is
done again is then another release, unless the bytes that were finished are sent again
(:meth:`fedloom.privacy.ledger.Ledger.released`).
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedloom.federation.records import Silo
from fedloom.privacy.accounting import Budget, Unit, check_delta, default_delta
from fedloom.privacy.ledger import Ledger
from fedloom.privacy.registry import LedgerRegistry


def data_ledger(path: Path, silo: Silo, epsilon: float, delta: float = 0.0, *, unit: Unit = "record") -> Ledger:
    """The ledger of a silo's data at a path, bound to them and to what their operator grants for good.

    ``delta`` 0 stands for the largest power of ten that is at most 1 / (10 n). What is only counted, up to an infinite
    epsilon, needs no filter, and a filter could not count it. A smaller epsilon than was granted before is kept to
    beside the first, a larger one is refused. So is a ledger that would count anew what another one has counted of
    these records (:mod:`fedloom.privacy.registry`); the registry follows every charge.
    """
    granted = check_delta(delta, len(silo)) if delta else default_delta(len(silo))
    budget = Budget(epsilon, granted, "filter" if math.isfinite(epsilon) else "pld", unit)
    with closing(LedgerRegistry()) as registry:
        ledger = Ledger(path) if path.exists() else None
        try:
            registry.check(silo, path, ledger)
            ledger = ledger or Ledger(path)
            _enrol(ledger, silo, registry.bind(silo, ledger), budget)
            registry.register(silo, ledger)
        except BaseException:
            if ledger is not None:
                ledger.close()
            raise
    ledger.watch(partial(_follow, registry.folder, silo, ledger))
    return ledger


def _enrol(ledger: Ledger, silo: Silo, records: str, budget: Budget) -> None:
    known = ledger.budget_of(silo.name)
    if known is not None and budget.epsilon < known.epsilon:
        ledger.enrol(silo.name, records, replace(known, delta=budget.delta, unit=budget.unit))
        ledger.tighten(silo.name, budget)
    else:
        ledger.enrol(silo.name, records, budget)


def _follow(registry: Path, silo: Silo, ledger: Ledger) -> None:
    """Make a charge one that cannot be taken back by another copy of the ledger."""
    with closing(LedgerRegistry(registry)) as found:
        found.register(silo, ledger)
