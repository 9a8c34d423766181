"""The silo's half of a round: see that it is what was agreed to, pay for it, train, keep what stays, answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import fedloom
from fedloom.config import Config
from fedloom.engines.base import Result, SiloState, Task, participants_of, site_of
from fedloom.engines.charging import silo_plans
from fedloom.engines.flower.frames import Frame
from fedloom.engines.flower.shelf import Shelf
from fedloom.engines.flower.work import Order, failure, received_in, refusal, update_frame, version_of
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError
from fedloom.federation.records import Federation
from fedloom.methods.base import Method, Setting, make_method
from fedloom.privacy.ledger import BudgetSpentError, Ledger
from fedloom.privacy.planning import SiloPlan
from fedloom.runs.folder import RunFolder

log = logging.getLogger(__name__)


class RefusedError(FedloomError):
    """The silo's operator has not agreed to this."""


Agreement = Callable[[Config, Method, SiloPlan | None], None]  # raises RefusedError for what was not agreed to


@dataclass(frozen=True, eq=False)
class Prepared:
    """An experiment at this silo, ready to train: it stays loaded from round to round."""

    trainer: Trainer
    plan: SiloPlan | None  # under DP-SGD


class SiloService:
    """Answers tasks with this silo's records, one after the other.

    ``federation`` holds this silo's records alone; the other silos are known by name.
    """

    def __init__(self, home: Path, federation: Federation, index: int, agreement: Agreement) -> None:
        self._home, self._federation, self._index, self._agreement = home, federation, index, agreement
        self._silo = federation.silos[index]
        self._prepared: dict[str, Prepared] = {}

    def answer(self, frame: Frame) -> Frame:
        """An update, or why there is none; a reason is said only where it was written for others to read."""
        try:
            return self._update(frame)
        except (RefusedError, BudgetSpentError) as error:
            log.warning("refused: %s", error)
            return refusal(str(error))
        except FedloomError as error:
            log.error("failed: %s", error)
            return failure(str(error))
        except Exception:
            log.exception("failed")
            return failure(f"an error inside silo '{self._silo.name}'; its own log says which")

    def _update(self, frame: Frame) -> Frame:
        if version_of(frame) != fedloom.__version__:
            raise RefusedError(
                f"the server runs fedloom {version_of(frame)}, silo '{self._silo.name}' {fedloom.__version__}"
            )
        order = Order.of(frame)
        prepared = self._ready(order.config)
        self._check_draw(order)
        number, task = order.context.round, _digest(frame)
        shelf, folder = Shelf(self._home / "rounds" / order.run), self._home / "runs" / order.run
        if (sent := shelf.update(number, task)) is not None:
            log.info("round %d of run %s: sending the same update again", number, order.run)
            return sent
        shelf.require_space(frame.size)
        site = site_of(self._federation, self._index)
        work = Task(
            silo=self._index,
            context=order.context,
            received=received_in(frame, prepared.trainer.method.plan, site),
            state=self._state(shelf, folder, number),
            mechanism=prepared.plan.mechanism(number) if prepared.plan else None,
        )
        self._charge(prepared, order, task)
        result = prepared.trainer.train(work)
        update = update_frame(result.update)
        shelf.put(number, task, result.state, update)
        shelf.clear(order.settled)
        self._report(folder, order, result, update.sha256)
        return update

    def _ready(self, config: Config) -> Prepared:
        """The experiment as this silo carries it out, if its operator agrees to it."""
        prepared = self._prepared.get(config.digest())
        if prepared is None:
            prepared = self._prepare(config)
        plan = prepared.plan
        self._agreement(config, prepared.trainer.method, plan)
        self._prepared[config.digest()] = prepared
        return prepared

    def _prepare(self, config: Config) -> Prepared:
        if config.data.layout != "federated" or config.audit.canaries:
            raise RefusedError("a deployment has no centralised layout and no canaries: both are for simulations")
        if config.privacy.mechanism != "none" and config.privacy.trust != "local":
            raise RefusedError(
                f"privacy.trust = '{config.privacy.trust}' needs a sum that the server cannot take apart, which a "
                "deployment does not have yet; use 'local'"
            )
        federation, index = self._federation, self._index
        names = tuple(silo.name for silo in federation.silos)
        method = make_method(Setting(config, federation.shape, federation.groups, federation.classes, names))
        # Plans are made from records, and only this silo's are here: it is looked at alone.
        budgets = {name: value for name, value in config.privacy.budgets.items() if name == self._silo.name}
        own = replace(config, privacy=replace(config.privacy, budgets=budgets))
        alone = replace(federation, silos=(self._silo,))
        drawn = [(0,) if index in self._drawn(config, r) else () for r in range(1, config.rounds + 1)]
        plans = silo_plans(own, alone, method, drawn)
        Trainer(own, method, alone, plans).check_privacy()
        # A trainer looks plans up by the silo's number, and will be asked for no other than this one.
        return Prepared(Trainer(config, method, federation, plans * len(federation)), plans[0] if plans else None)

    def _drawn(self, config: Config, round: int) -> tuple[int, ...]:
        return participants_of(config, self._federation, round)

    def _check_draw(self, order: Order) -> None:
        """The public draw decides who takes part, and what was planned to be spent; the server cannot add rounds."""
        context = order.context
        if context.rounds != order.config.rounds or not 1 <= context.round <= context.rounds:
            raise RefusedError(f"round {context.round} of {context.rounds} is not one of this experiment")
        if self._index not in self._drawn(order.config, context.round):
            raise RefusedError(f"silo '{self._silo.name}' was not drawn for round {context.round}")

    def _state(self, shelf: Shelf, folder: Path, number: int) -> SiloState:
        """What the silo had kept before a round; that it has lost something is no reason to start afresh."""
        rows = RunFolder.open(folder).metrics() if folder.is_dir() else []
        before = [row["round"] for row in rows if row["round"] < number]
        if before and not any(kept < number for kept in shelf.rounds()):
            raise RefusedError(
                f"silo '{self._silo.name}' took part in round {before[-1]}, but what it kept of it is gone: it cannot "
                f"go on with round {number}"
            )
        return shelf.state_before(number)

    def _charge(self, prepared: Prepared, order: Order, task: str) -> None:
        """Durably, before anything is trained."""
        if prepared.plan is None:
            return
        ledger = Ledger(self._home / "ledger.sqlite")
        try:
            ledger.enrol(self._silo.name, self._silo.digest, prepared.plan.budget)
            for release, event in prepared.plan.events(order.context.round).items():
                ledger.charge(order.run, self._silo.name, order.context.round, release, event, content=task)
        finally:
            ledger.close()

    def _report(self, path: Path, order: Order, result: Result, sha256: str) -> None:
        """The silo's own run folder: what nobody else gets to see."""
        number, known = order.context.round, path.is_dir()
        folder = RunFolder.open(path) if known else RunFolder.create(path, order.config)
        if not known:
            folder.note({"engine": f"flower, the own report of silo '{self._silo.name}'"})
        if any(row["round"] >= number for row in folder.metrics()):
            folder.rewind(number - 1)
        row = {"round": number, "seconds": result.seconds, "participants": [self._index], "steps": result.steps}
        terms = {f"train/{name}": value for name, value in result.terms.items()}
        folder.record_round(row | terms, [replace(result.egress, sha256=sha256).to_mapping()])
        if number == order.context.rounds:
            folder.end("finished", number)


def _digest(frame: Frame) -> str:
    """All of a task that determines what comes of it."""
    header = {key: value for key, value in frame.header.items() if key != "settled"}
    return sha256(f"{json.dumps(header, sort_keys=True)}/{frame.sha256}".encode()).hexdigest()
