"""The silo's half of a round: see that it is what was agreed to, pay for it, train, keep what stays, answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

import fedloom
from fedloom.config import Config
from fedloom.discovery.grouping import told, unnamed
from fedloom.engines.base import Result, SiloState, Task, participants_of, site_of
from fedloom.engines.before import released
from fedloom.engines.charging import own_plan, privacy_of_silos, shares_noise
from fedloom.engines.remote.assignments import Assignment, Prepared, digest_of
from fedloom.engines.remote.frames import STATE, Frame
from fedloom.engines.remote.grants import Agreement, Grant, Screening, training_device
from fedloom.engines.remote.pace import Pacemaker
from fedloom.engines.remote.recording import asked_in, recorded
from fedloom.engines.remote.round_store import KeptRound, RoundStore
from fedloom.engines.remote.statement_frames import bundle_in, words_frame
from fedloom.engines.remote.stating import words_of
from fedloom.engines.remote.work import (
    EXPERIMENTS,
    Order,
    RefusedError,
    coming_down,
    failure,
    received_in,
    refusal,
    refused,
    update_frame,
    version_of,
)
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, FedloomError
from fedloom.federation.records import Federation
from fedloom.methods.base import Setting, make_method, some_model
from fedloom.operations.spending import audited, refuse_held
from fedloom.operations.trail import AUDIT, Trail
from fedloom.privacy.deployment import data_ledger
from fedloom.privacy.ledger import BEFORE, BudgetSpentError, GrantError, Ledger
from fedloom.privacy.noise import StreamNoise, deployment_noise
from fedloom.privacy.silo_privacy import SiloPrivacy
from fedloom.registry import NotAllowedError, allowed
from fedloom.runs.folder import RunFolder
from fedloom.sharing.update import EgressRecord
from fedloom.streams import Streams

log = logging.getLogger(__name__)


NOTHING_DECLARED: Mapping[str, int] = MappingProxyType({})


UNDECIDED = Grant(0.0)  # what a trainer with secret noise is prepared for


class SiloService:
    """Answers tasks with this silo's records, one after the other.

    ``federation`` holds this silo's records alone; the other silos are known by name.
    """

    def __init__(
        self,
        home: Path,
        federation: Federation,
        index: int,
        screening: Screening,
        agreement: Agreement,
        pacemaker: Pacemaker | None = None,
        declared: Mapping[str, int] = NOTHING_DECLARED,
    ) -> None:
        """``declared``: how many records each silo has at most, as the charter says."""
        self._home, self._federation, self._index = home, federation, index
        self._screening, self._agreement = screening, agreement
        self._pacemaker = pacemaker or Pacemaker()
        self._silo = federation.silos[index]
        self._declared, self._prepared = declared, dict[Hashable, Prepared]()
        self._reports = dict[str, RunFolder]()  # by run
        self._trail = Trail(home / AUDIT)

    def answer(self, frame: Frame) -> Frame:
        """An update, or what a run has cost, or why there is neither; the silo's audit log has it before it leaves."""
        return recorded(self._trail, frame, self._guarded)

    def _guarded(self, frame: Frame) -> Frame:
        """A reason is said only where it was written for others to read: errors may tell of paths and spending."""
        name, came = self._silo.name, self._pacemaker.clock()
        try:
            self._check_version(frame)
            return self._answered(frame, came)
        except RefusedError as error:
            log.warning("refused: %s", error)
            return refusal(str(error))
        except BudgetSpentError as error:
            log.warning("refused: %s", error)
            return refusal(f"silo '{name}' sits out: this would pass what may be spent on its data")
        except NotAllowedError as error:  # of whose package and version a server need not know
            log.warning("refused: %s", error)
            return refusal(f"silo '{name}' does not agree: policy.toml allows no plug-in that brings {error.title}")
        except (ConfigError, GrantError) as error:  # asked again, the answer would be the same
            log.warning("refused: %s", error)
            return refusal(f"silo '{name}' cannot do this; its own log says why")
        except FedloomError as error:
            log.error("failed: %s", error)
            return failure(f"silo '{name}' failed; its own log says why")
        except Exception:
            log.exception("failed")
            return failure(f"silo '{name}' failed; its own log says why")

    def _check_version(self, frame: Frame) -> None:
        if version_of(frame) != fedloom.__version__:
            raise RefusedError(
                f"the server runs fedloom {version_of(frame)}, silo '{self._silo.name}' {fedloom.__version__}"
            )

    def _statement(self, frame: Frame) -> Frame:
        """What this silo states of a run, for its node to sign."""
        with refused():
            bundle = bundle_in(frame)
        return words_frame(words_of(bundle, self._federation, self._index, self._home))

    def _answered(self, frame: Frame, came: float) -> Frame:
        return self._statement(frame) if frame.kind == STATE else self._update(frame, came)

    def _assignment(self, frame: Frame) -> Assignment:
        """What a task asks for, if it is what was agreed to; nothing has been done for it yet."""
        with refused():
            order = Order.of(frame)
        prepared = self.ready(order.config, order.groups, order.group)
        self._check_draw(order)
        self._trail.note("approved", asked_in(frame), durable=False)
        with refused():
            plan, site = prepared.trainer.method.plan, site_of(prepared.trainer.federation, self._index)
            received = received_in(frame, plan, site, {} if order.context.round == BEFORE else prepared.expected)
        if order.config.engine.threads:  # their number may change the last bit
            torch.set_num_threads(order.config.engine.threads)
        round_store, folder = RoundStore(self._home / "rounds" / order.run), self._report_of(order.run)
        self._check_experiment(order, round_store, folder)
        round_store.require_space(prepared.size)
        task = Task(
            silo=self._index,
            context=order.context,
            received=received,
            state=self._state(round_store, folder, order.context.round),
            mechanism=prepared.privacy.mechanism(order.context.round) if prepared.privacy else None,
        )
        return Assignment(order, prepared, task, digest_of(frame), round_store)

    def _trained(self, assignment: Assignment) -> Result:
        """All that looks at records is sealed: one that cannot be computed counts for nothing.

        What may still fail here is a function of the task, of public numbers and of sums that already have their noise,
        as are the weights that it leaves; so it fails as it is, and says nothing of a record by that.
        """
        trainer, task = assignment.prepared.trainer, assignment.task
        if task.context.round != BEFORE:
            return trainer.train(task)
        update, egress = released(trainer, self._index)
        return Result(self._index, update, egress, SiloState(), {}, steps=0, seconds=0.0)

    def _update(self, frame: Frame, came: float) -> Frame:
        assignment = self._assignment(frame)
        if shares_noise(assignment.order.config):
            raise RefusedError(f"silo '{self._silo.name}' sends nothing but secure sums where silos share noise")
        results: list[Result] = []

        def make() -> Frame:
            results.append(self._trained(assignment))
            return update_frame(results[0].update)

        def store(update: Frame) -> None:
            self._keep(assignment, results[0], replace(results[0].egress, sha256=update.sha256), update)

        stored = assignment.round_store.update(assignment.order.context.round, assignment.digest)
        with self._pacemaker.kept(came, assignment.prepared.grant.pace if assignment.prepared.privacy else 0.0):
            released = self._released(assignment, stored, make, store, repeatable=assignment.prepared.grant.repeatable)
            self._report(assignment)
        return released

    def _keep(self, assignment: Assignment, result: Result, egress: EgressRecord, update: Frame) -> None:
        entry = self._entry(assignment, result, egress)
        assignment.round_store.put(assignment.order.context.round, entry, result.state, update)
        assignment.round_store.clear(assignment.order.settled)

    def _released(
        self,
        assignment: Assignment,
        stored: Frame | None,
        make: Callable[[], Frame],
        store: Callable[[Frame], None],
        *,
        repeatable: bool,
    ) -> Frame:
        """What leaves: what was sent for this very task before, else something new, paid for before it is made."""
        privacy, grant, order = assignment.prepared.privacy, assignment.prepared.grant, assignment.order
        if privacy is None:
            if stored is None:
                store(stored := make())
            return stored
        refuse_held(self._home)
        events, ledger = assignment.prepared.events(order.context.round), self.ledger(grant)
        try:
            sent = ledger.released(
                order.run,
                self._silo.name,
                order.context.round,
                events,
                content=assignment.digest if repeatable else None,
                stored=stored.to_bytes() if stored else None,
                make=lambda: make().to_bytes(),
                store=lambda update: store(Frame.of_bytes(update)),
            )
        finally:
            ledger.close()
        return Frame.of_bytes(sent)

    def ledger(self, grant: Grant) -> Ledger:
        """The ledger of the silo's records, with the audit log beside it."""
        path = self._home / "ledger.sqlite"
        return audited(data_ledger(path, self._silo, grant.epsilon, grant.delta, unit=grant.unit), self._home)

    def ready(self, config: Config, groups: tuple[str, ...] = (), group: str = "") -> Prepared:
        """The experiment as this silo carries it out, if its operator agrees to it; ``groups`` are those found."""
        self._screening(config)
        # What was imported when more plug-ins were allowed is not used on.
        key = config.digest(), groups, group, allowed()
        known = self._prepared.pop(key, None) or self._prepare(config, self._grouped(config, groups, group))
        grant = self._agreement(config, known.trainer.method, known.privacy)  # may have changed since the last round
        secret = StreamNoise(Streams(config.seed)) if grant.repeatable else deployment_noise(None)
        if grant != known.grant:
            privacy = known.privacy and replace(known.privacy, min_clip=grant.min_clip)
            trainer = replace(
                known.trainer,
                privacy=(privacy,) * len(self._federation) if privacy else (),
                secret=secret,
                device=training_device(grant.device, private=privacy is not None),
            )
            known = replace(known, trainer=trainer, privacy=privacy, grant=grant)
        self._prepared[key] = known
        for oldest in list(self._prepared)[:-EXPERIMENTS]:
            del self._prepared[oldest]
        return known

    def _grouped(self, config: Config, groups: tuple[str, ...], group: str) -> Federation:
        """The federation with the groups of the charter, or those that were found, or will be."""
        if config.data.groups != "discover":
            return self._federation
        with refused():
            return told(self._federation, groups, group) if groups else unnamed(self._federation)

    def _prepare(self, config: Config, federation: Federation) -> Prepared:
        if config.data.layout != "federated" or config.audit.canaries:
            raise RefusedError("a deployment has no centralised layout and no canaries: both are for simulations")
        index = self._index
        method = make_method(Setting.of(config, federation))
        # Plans are made from records, and only this silo's are here: it is looked at alone.
        budgets = {name: value for name, value in config.privacy.budgets.items() if name == self._silo.name}
        own = replace(config, privacy=replace(config.privacy, budgets=budgets))
        alone = replace(federation, silos=(federation.silos[index],))
        drawn = [(0,) if index in self._drawn(config, r) else () for r in range(1, config.rounds + 1)]
        found: tuple[SiloPrivacy, ...]
        if shares_noise(config):
            found = (own_plan(config, federation, method, self._declared, index),)
        else:
            found = privacy_of_silos(own, alone, method, drawn)
        Trainer(own, method, alone, found).check_privacy()
        # A trainer looks it up by the silo's number, and will be asked for no other than this one.
        private, site = found * len(federation), site_of(federation, index)
        trainer = Trainer(config, method, federation, private, deployment_noise(None), sealed=bool(found))
        state = some_model(method, site).state_dict()
        size, expected = sum(tensor.nbytes for tensor in state.values()), coming_down(method.plan, site, state)
        return Prepared(trainer, found[0] if found else None, UNDECIDED, size, expected)

    def _drawn(self, config: Config, round: int) -> tuple[int, ...]:
        return participants_of(config, self._federation, round)

    def _check_draw(self, order: Order) -> None:
        """The public draw decides who takes part, and what was planned to be spent; the server cannot add rounds."""
        context = order.context
        if order.config.data.groups == "discover":
            if context.round == BEFORE:
                return
            if not order.groups:
                raise RefusedError(f"silo '{self._silo.name}' was not told its group")
        if context.rounds != order.config.rounds or not 1 <= context.round <= context.rounds:
            raise RefusedError(f"round {context.round} of {context.rounds} is not one of this experiment")
        if self._index not in self._drawn(order.config, context.round):
            raise RefusedError(f"silo '{self._silo.name}' was not drawn for round {context.round}")

    def _report_of(self, run: str) -> RunFolder | None:
        """The silo's own report of a run, if there is one yet; its settings, which do not change, are read once."""
        path = self._home / "runs" / run
        known = self._reports.pop(run, None)
        if not path.is_dir():
            return None
        self._reports[run] = found = known or RunFolder.open(path)
        for oldest in list(self._reports)[:-EXPERIMENTS]:
            del self._reports[oldest]
        return found

    def _check_experiment(self, order: Order, round_store: RoundStore, folder: RunFolder | None) -> None:
        """A run's name stands for one experiment: what was kept of it must not go into another."""
        known = {round_store.entry(kept).experiment for kept in round_store.rounds()}
        if folder:
            known.add(folder.config.digest())
        if known - {order.config.digest()}:
            raise RefusedError(f"silo '{self._silo.name}' knows run '{order.run}' as another experiment")

    def _state(self, round_store: RoundStore, folder: RunFolder | None, number: int) -> SiloState:
        """What the silo had kept before a round; that it has lost something is no reason to start afresh."""
        rows = folder.metrics() if folder else []
        before = [row["round"] for row in rows if row["round"] < number]
        if before and not any(kept < number for kept in round_store.rounds()):
            raise RefusedError(
                f"silo '{self._silo.name}' took part in round {before[-1]}, but what it kept of it is gone: it cannot "
                f"go on with round {number}"
            )
        return round_store.state_before(number)

    def _entry(self, assignment: Assignment, result: Result, egress: EgressRecord) -> KeptRound:
        """The lines of a round in the silo's own report, kept with what leaves so that neither is without the other."""
        number = assignment.order.context.round
        row = {"round": number, "seconds": result.seconds, "participants": [self._index], "steps": result.steps}
        terms = {f"train/{name}": value for name, value in result.terms.items()}
        return KeptRound(assignment.digest, assignment.order.config.digest(), row | terms, egress.to_mapping())

    def _report(self, assignment: Assignment) -> None:
        """The silo's own run folder, which nobody else gets to see: nothing leaves before its lines are there."""
        order, number = assignment.order, assignment.order.context.round
        entry = assignment.round_store.entry(number)
        folder = self._report_of(order.run)
        if folder is None:
            folder = RunFolder.create(self._home / "runs" / order.run, order.config)
            folder.note({"engine": f"flower, the own report of silo '{self._silo.name}'"})
        left = [] if entry.egress in folder.egress() else [entry.egress]
        if number == BEFORE:
            folder.record_before(left)
        elif left or entry.metrics not in folder.metrics():
            folder.rewind(number - 1, logs=("metrics.jsonl",))  # of a round that is done again; what left has left
            folder.record_round(entry.metrics, left)
        if number == order.context.rounds:
            folder.end("finished", number)
