"""The server's half of a federation whose silos are elsewhere: ask, wait no longer than is ruled, check, conclude."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from fedloom.engines.base import (
    FederationState,
    Job,
    Result,
    RoundReport,
    SiloState,
    conclude,
    sent_down,
    site_of,
)
from fedloom.engines.before import context_before
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.inspection import Inspection, RejectedError, outliers
from fedloom.engines.remote.rules import RoundRules
from fedloom.engines.remote.wire import Answer, Question, Wire
from fedloom.engines.remote.work import REFUSED, UPDATE, Order, update_in
from fedloom.engines.training import Trainer, local_steps
from fedloom.errors import ConfigError, FedloomError
from fedloom.federation.rounds import RoundContext
from fedloom.privacy.ledger import BEFORE
from fedloom.sharing.codec import packed
from fedloom.sharing.plan import BlockKey

TICK = 0.5  # seconds between two looks at who is there
clock = time.monotonic


class ShortRoundError(FedloomError):
    """Too few silos sent an update; the run can be resumed when more are there."""


@dataclass(frozen=True)
class Event:
    """What happened with one silo in one round, for the journal."""

    round: int
    silo: str
    event: Literal["asked", "answered", "failed", "refused", "rejected", "late", "missing", "unstated"]
    reason: str = ""
    seconds: float = 0.0  # since it was asked
    bytes: int = 0  # that went down, or came up


@dataclass
class _Owed:
    """An answer that a silo owes."""

    round: int
    node: int  # that was asked last
    asked: float  # when that was
    times: int  # that it was asked, without those that failed
    away: bool = False  # it was seen to be gone since it was asked
    delays: int | None = None  # the one later round that may wait for it


@dataclass
class _Progress:
    """A round under way."""

    state: FederationState
    context: RoundContext
    on_silo: Callable[[Result], None]
    start: float = field(default_factory=lambda: clock())
    tries: dict[int, int] = field(default_factory=dict)  # how often each silo was asked
    results: dict[int, Result] = field(default_factory=dict)
    packed: dict[BlockKey, bytes] = field(default_factory=dict)  # what goes down: the same bytes for all who get it
    out: dict[int, str] = field(default_factory=dict)  # silos that will send nothing in this round, and why

    @property
    def seconds(self) -> float:
        return clock() - self.start

    @property
    def awaited(self) -> list[int]:
        return [silo for silo in self.context.participants if silo not in self.results and silo not in self.out]


class RemoteEngine:
    """An engine whose silos train where their records are.

    ``run`` is the run's own name, under which silos keep what belongs to it; ``records`` are the most that each silo
    declared to hold, empty where none did and all weigh the same; ``journal`` hears of every event.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: str,
        wire: Wire,
        rules: RoundRules,
        records: Mapping[str, int],
        journal: Callable[[Event], None],
    ) -> None:
        if rules.stragglers == "use" and trainer.method.plan.compressed.blocks:
            raise ConfigError(
                "rounds.stragglers = 'use' in federation.toml takes whole weights of earlier rounds, but "
                f"sharing.compression = '{trainer.method.plan.compression}' sends how far they moved; use 'drop'"
            )
        if rules.stragglers == "use" and any(phase.last for phase in trainer.method.phases):
            raise ConfigError(
                "rounds.stragglers = 'use' in federation.toml would move blocks on after the rounds in which method "
                f"'{trainer.method.name}' trains them; use 'drop'"
            )
        self._trainer, self._run, self._wire, self._rules, self._journal = trainer, run, wire, rules, journal
        self._silos = [silo.name for silo in trainer.federation.silos]
        self._inspection = Inspection(trainer, rules.max_records, records)
        self._server = ReferenceEngine(trainer)  # where the server itself has something to learn
        self._owed: dict[int, _Owed] = {}  # by each silo that has not answered
        self._heard: set[tuple[int, int]] = set()  # silos and rounds: who was asked twice may answer twice

    def describe(self) -> str:
        """How many silos, and how long they have."""
        return f"flower, {len(self._silos)} silos, at most {self._rules.deadline:g} s a round"

    def choice(self) -> dict[str, Any]:
        """The run's own name: silos go on with what they kept under it."""
        return {"name": "flower", "run": self._run}

    def close(self) -> None:
        """Wait for nobody any more."""
        self._wire.close()
        self._server.close()

    def round(self, job: Job) -> tuple[FederationState, RoundReport]:
        """One round, with the updates of those who sent a good one in time."""
        progress, state = self._gathered(job), job.state
        self._reject_outliers(progress)
        self._require_minimum(progress)
        results = list(progress.results.values())
        present = replace(job.context, participants=tuple(sorted(progress.results)))
        concluded = conclude(
            self._trainer.method, state, present, results, self._trainer.streams, distiller=self._server
        )
        _check_finite(concluded[0])
        return concluded

    def before(self, state: FederationState) -> list[Result]:
        """What all silos release before the first round; without one of them nobody is grouped."""
        try:
            progress = self._gathered(Job(state, context_before(self._trainer), lambda _: None))
            self._require_minimum(progress)
        except BaseException:
            self.close()  # there will be no rounds that end with it
            raise
        return [progress.results[silo] for silo in sorted(progress.results)]

    def regrouped(self, trainer: Trainer) -> RemoteEngine:
        """The same silos on the same wire, in the groups that were found."""
        self._server.close()
        records = self._inspection.records
        found = RemoteEngine(trainer, self._run, self._wire, self._rules, records, self._journal)
        found._heard, found._owed = self._heard, self._owed
        return found

    def _gathered(self, job: Job) -> _Progress:
        """A round's results, of those who sent a good one in time."""
        context = job.context
        progress = _Progress(job.state, context, job.on_silo)
        for owed in (self._owed[silo] for silo in context.participants if silo in self._owed):
            owed.delays = owed.delays or context.round
        while not self._over(progress):
            self._ask(progress)
            answer = self._wire.answer(TICK)
            while answer is not None:  # all that have come, before anybody is looked after
                self._take(answer, progress)
                answer = self._wire.answer(0.0)
        for silo in progress.awaited:
            lost = "".join(f", and without '{name}', which was due from it" for name in self._due(silo, context.round))
            self._journal(Event(context.round, self._silos[silo], "missing", f"the round went on without it{lost}"))
        return progress

    def _over(self, progress: _Progress) -> bool:
        """Whether there is nobody left to wait for, or no time."""
        rules, seconds = self._rules, progress.seconds
        waiting = [s for s in progress.awaited if s in self._owed or progress.tries.get(s, 0) < rules.attempts]
        if not waiting:
            return True
        if len(progress.results) < self._minimum(progress):
            if progress.context.round == BEFORE and progress.out and not any(silo in self._owed for silo in waiting):
                return True  # it needs everybody, and whoever is not there yet need not pay for it
            return seconds > rules.deadline * (1 + rules.extensions)
        if seconds > rules.deadline:
            return True
        owed = [self._owed[silo] for silo in waiting if silo in self._owed]
        if any(each.round == progress.context.round for each in owed):
            return False
        if seconds <= rules.grace:
            return len(owed) == len(waiting) and not any(each.delays == progress.context.round for each in owed)
        online = self._wire.online()
        return not any(silo not in self._owed and self._silos[silo] in online for silo in waiting)

    def _ask(self, progress: _Progress) -> None:
        """Everybody who has not been asked, or has failed, or whose answer seems to be lost, and is there."""
        context, rules = progress.context, self._rules
        online = self._wire.online()
        for silo, owed in self._owed.items():
            owed.away = owed.away or online.get(self._silos[silo]) != owed.node
        questions = []
        for silo in progress.awaited:
            name, tries = self._silos[silo], progress.tries.get(silo, 0)
            if name not in online or tries >= rules.attempts or not self._is_free(silo, context.round):
                continue
            order, most = self._order(progress, silo), self._inspection.most(silo)
            questions.append(Question(name, online[name], context.round, order, most))
            progress.tries[silo] = tries + 1
            before = self._owed.get(silo)
            if before and before.round != context.round and rules.stragglers == "drop":
                self._wire.withdraw(name, before.round)  # it was away, and must not begin with what nobody takes
            times = before.times if before and before.round == context.round else 0
            self._owed[silo] = _Owed(context.round, online[name], clock(), times + 1)
            self._journal(Event(context.round, name, "asked", bytes=questions[-1].frame.size))
        if questions:
            self._wire.ask(questions, rules.deadline * rules.patience)

    def _is_free(self, silo: int, round: int) -> bool:
        """Whether a silo that is there owes nothing, or what it owes will hardly come.

        Asked for the same round again, it sends the bytes that it sent before. To be asked for another while it may
        still be at work would put it further behind with every round: it must have been away for that.
        """
        owed = self._owed.get(silo)
        return owed is None or owed.away or (owed.round == round and clock() - owed.asked > self._rules.resend)

    def _order(self, progress: _Progress, silo: int) -> Frame:
        config, plan = self._trainer.config, self._trainer.method.plan
        every, kept = config.engine.checkpoint_every, config.engine.keep_checkpoints
        newest = progress.state.round // every * every
        order = Order(self._run, config, progress.context, settled=max(0, newest - every * (kept - 1)))
        site = site_of(self._trainer.federation, silo)
        if progress.context.round == BEFORE:  # nothing comes down
            return order.frame({})
        if config.data.groups == "discover":
            order = replace(order, groups=plan.groups, group=plan.groups[site.groups[0]])
        coming = sent_down(plan, progress.state.server, site)
        for key, tensors in coming.items():
            if tensors and key not in progress.packed:
                progress.packed[key] = packed(tensors)
        return order.frame({key: progress.packed[key] for key, tensors in coming.items() if tensors})

    def _take(self, answer: Answer, progress: _Progress) -> None:
        """Put an answer where it belongs."""
        silo, number = self._silos.index(answer.silo), progress.context.round
        if (silo, answer.round) in self._heard:
            return
        late = answer.round != number
        frame, reason = answer.frame, answer.problem
        if frame is None or frame.kind not in (UPDATE, REFUSED):
            self._settle(silo, answer.round, failed=True)
            reason = reason or str(frame.header.get("reason", "it does not say why") if frame else "")
            self._journal(Event(answer.round, answer.silo, "failed", reason, answer.seconds))
            return
        self._settle(silo, answer.round, failed=False)
        if frame.kind == REFUSED:
            reason = str(frame.header.get("reason", "it does not say why"))
            self._journal(Event(answer.round, answer.silo, "refused", reason, answer.seconds))
            if not late:
                progress.out[silo] = f"silo '{answer.silo}' refused: {reason}"
            return
        if silo in progress.results or silo in progress.out or (late and self._rules.stragglers == "drop"):
            self._journal(Event(answer.round, answer.silo, "late", f"in round {number}", answer.seconds, frame.size))
            return
        try:
            progress.results[silo] = result = self._result(answer, silo, progress)
        except Exception as error:  # whatever a silo sends concerns this silo alone
            unforeseen = f"silo '{answer.silo}' sent what cannot be checked: {type(error).__name__}: {error}"
            reason = str(error) if isinstance(error, FedloomError) else unforeseen
            self._journal(Event(answer.round, answer.silo, "rejected", reason, answer.seconds, frame.size))
            if not late:
                progress.out[silo] = reason
            return
        self._journal(Event(answer.round, answer.silo, "answered", "", answer.seconds, frame.size))
        progress.on_silo(result)

    def _settle(self, silo: int, round: int, *, failed: bool) -> None:
        """The first answer settles what a silo owes for a round, however often it was asked; else the last failure."""
        if not failed:
            self._heard.add((silo, round))
        owed = self._owed.get(silo)
        if owed is not None and owed.round == round:
            owed.times -= 1
            if not failed or not owed.times:
                del self._owed[silo]

    def _result(self, answer: Answer, silo: int, progress: _Progress) -> Result:
        assert answer.frame is not None
        update = update_in(answer.frame, answer.silo)
        if update.round != answer.round:
            raise RejectedError(f"silo '{answer.silo}' sent round {update.round} when it was asked for {answer.round}")
        update = self._inspection.landed(silo, update, progress.state.server)
        due = self._due(silo, update.round)
        egress = self._inspection.passed(silo, update, due, progress.state.server.blocks, answer.frame.sha256)
        # Losses stay at the silo; how many steps it took follows from its public number of records.
        steps = local_steps(self._trainer.config, int(update.counts["all"])) if self._trainer.method.phases else 0
        weighed = self._inspection.weighed(update)
        return Result(silo, weighed, egress, SiloState(), terms={}, steps=steps, seconds=answer.seconds)

    def _due(self, silo: int, round: int) -> list[str]:
        """The payloads that a silo has to send in a round."""
        trainer = self._trainer
        return [rule.name for rule in trainer.method.payloads if round in rule.rounds(trainer.attended[silo])]

    def _reject_outliers(self, progress: _Progress) -> None:
        updates = [result.update for result in progress.results.values()]
        found = outliers(updates, progress.state.server.blocks, self._rules.norm_factor)
        for name, reason in found.items():
            self._journal(Event(progress.context.round, name, "rejected", reason))
            progress.out[self._silos.index(name)] = reason
            del progress.results[self._silos.index(name)]

    def _minimum(self, progress: _Progress) -> int:
        everyone = len(progress.context.participants)
        return everyone if progress.context.round == BEFORE else min(self._rules.minimum, everyone)

    def _require_minimum(self, progress: _Progress) -> None:
        needed, number = self._minimum(progress), progress.context.round
        if len(progress.results) < needed:
            missing = [f"silo '{self._silos[silo]}' sent nothing in time" for silo in progress.awaited]
            raise ShortRoundError(
                f"round {number} has {len(progress.results)} of the {needed} updates that it needs (rounds.minimum in "
                f"federation.toml): {'; '.join([*progress.out.values(), *missing])}; resume the run when they can come"
            )


def _check_finite(state: FederationState) -> None:
    """What each silo sent was finite; what came of all of it is looked at before it is kept."""
    for key, tensors in state.server.blocks.items():
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise FedloomError(
                    f"round {state.round} would leave values that are not finite in '{key}/{name}'; it is not kept"
                )
