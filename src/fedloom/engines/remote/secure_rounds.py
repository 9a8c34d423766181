"""The server's half of rounds of which it sees sums alone: it asks turn by turn, and takes the step with the sum."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

from fedloom.engines.base import FederationState, Job, Result, RoundReport, SiloState, finished, received_by, site_of
from fedloom.engines.distributed import of_sums
from fedloom.engines.masked_sums import MaskedSum, SummedRounds, stepped_by, terms_of
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.rounds import Event, ShortRoundError
from fedloom.engines.remote.rules import RoundRules
from fedloom.engines.remote.secure_frames import SECURE, Asked
from fedloom.engines.remote.wire import Answer, Question, Wire
from fedloom.engines.remote.work import REFUSED, Order
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError
from fedloom.privacy.signatures import is_signed
from fedloom.secure.collector import Collector
from fedloom.secure.terms import SecureSumError, Turn
from fedloom.sharing.codec import packed
from fedloom.sharing.update import Update

Departure = Literal["missing", "refused", "failed", "rejected"]
TICK = 0.5  # seconds between two looks at who is there
SMALL = 2**20  # bytes that letters, keys and shares of all silos have at most


@dataclass(eq=False)
class _Sum:
    """A sum under way."""

    collector: Collector
    summed: MaskedSum
    results: dict[str, Result] = field(default_factory=dict)  # of those whose numbers have come
    gone: dict[str, str] = field(default_factory=dict)  # who has dropped out, and why


class SecureEngine:
    """An engine whose silos add up what they send under masks.

    ``records`` are the most that each silo declared, ``keys`` the registered public keys; the rest is as in
    :class:`~fedloom.engines.remote.rounds.RemoteEngine`. A round that is not brought to its end is not tried again by
    itself: silos have paid for what they sent, and would pay again.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: str,
        wire: Wire,
        rules: RoundRules,
        records: Mapping[str, int],
        keys: Mapping[str, bytes],
        journal: Callable[[Event], None],
    ) -> None:
        self._trainer, self._run, self._wire, self._rules, self._journal = trainer, run, wire, rules, journal
        self._method, self._records, self._keys = of_sums(trainer.method), records, keys
        self._silos = [silo.name for silo in trainer.federation.silos]
        self._server = ReferenceEngine(trainer)  # where the server itself has something to learn

    def describe(self) -> str:
        """How many silos, and how long they have."""
        return f"flower, secure sums of {len(self._silos)} silos, at most {self._rules.deadline:g} s a turn"

    def choice(self) -> dict[str, Any]:
        """The run's own name: silos go on with what they kept under it."""
        return {"name": "flower", "run": self._run}

    def close(self) -> None:
        """Wait for nobody any more."""
        self._wire.close()
        self._server.close()

    @cached_property
    def _sums(self) -> SummedRounds:
        trainer = self._trainer
        return SummedRounds.declared(trainer.config, trainer.federation, trainer.method, self._records)

    def round(self, job: Job) -> tuple[FederationState, RoundReport]:
        """One round, with those silos that stayed to the end of the sum, or none."""
        context, attempt = job.context, secrets.token_hex(8)
        summed = self._sums.of(context.round)
        terms = terms_of(self._trainer.config, self._silos, self._run, context, attempt, summed)
        sum = _Sum(Collector(terms, self._genuine), summed)
        for turn in Turn:
            self._ask_all(sum, Asked(self._run, context.round, attempt, turn), job)
            try:
                sum.collector.advance()
            except SecureSumError as error:
                told = "; ".join(f"silo '{silo}': {reason}" for silo, reason in sum.gone.items())
                raise ShortRoundError(
                    f"round {context.round} is given up before anything was unmasked: {error} ({told}); what silos "
                    "have paid for it stays paid; resume the run when they can come"
                ) from error
        return self._concluded(job, sum, summed.update(sum.collector.total, context.round))

    def _concluded(self, job: Job, sum: _Sum, total: Update) -> tuple[FederationState, RoundReport]:
        """The server's step, which is shown the sum."""
        came = [sum.results[silo] for silo in sum.collector.present]
        context, state = replace(job.context, participants=tuple(result.silo for result in came)), job.state
        for result in came:
            job.on_silo(result)
        found = stepped_by(self._trainer, self._method, total, state, context)
        return finished(self._method, state, context, came, found, self._server)

    def _ask_all(self, sum: _Sum, asked: Asked, job: Job) -> None:
        """Ask everybody who is awaited, until they have answered or have gone, or time is up."""
        start, nodes = time.monotonic(), dict[str, int]()
        while waiting := [silo for silo in sum.collector.awaited if silo not in sum.gone]:
            online, seconds = self._wire.online(), time.monotonic() - start
            if new := [silo for silo in waiting if silo in online and silo not in nodes]:
                ring, frame = sum.summed.ring, partial(self._question, asked, sum.collector, job=job)
                most = ring.size * ring.width + SMALL
                questions = [Question(silo, online[silo], asked.round, frame(silo), most) for silo in new]
                nodes |= {question.silo: question.node for question in questions}
                if asked.turn is Turn.KEYS:
                    for question in questions:
                        self._journal(Event(asked.round, question.silo, "asked", bytes=question.frame.size))
                self._wire.ask(questions, self._rules.deadline)
            there = [silo for silo in waiting if silo in nodes and online.get(silo) == nodes[silo]]
            if seconds > self._rules.deadline or (seconds > self._rules.grace and not there):
                for silo in waiting:
                    self._lose(sum, asked, silo, "missing", f"it was not there, or silent, at turn '{asked.turn}'")
                return
            if answer := self._wire.answer(TICK):
                self._take(answer, asked, sum)

    def _question(self, asked: Asked, collector: Collector, silo: str, job: Job) -> Frame:
        if asked.turn is not Turn.KEYS:
            return asked.frame(collector.question(silo))
        order = Order(self._run, self._trainer.config, job.context, settled=max(0, job.state.round - 1))
        plan, site = self._method.plan, site_of(self._trainer.federation, self._silos.index(silo))
        coming = plan.split(received_by(plan, job.state.server, site), site)
        task = order.frame({key: packed(tensors) for key, tensors in coming.items() if tensors})
        registered = {name: line.decode().strip() for name, line in self._keys.items()}
        return asked.frame(task.parts, {**task.header, "registered": registered})

    def _take(self, answer: Answer, asked: Asked, sum: _Sum) -> None:
        """Put an answer where it belongs; a silo whose answer is none has dropped out."""
        frame, silo = answer.frame, answer.silo
        if answer.round != asked.round or silo not in sum.collector.awaited or silo in sum.gone:
            return
        if frame is None or frame.kind != SECURE:
            reason = answer.problem or str(frame.header.get("reason", "it does not say why") if frame else "")
            refused = frame is not None and frame.kind == REFUSED
            self._lose(sum, asked, silo, "refused" if refused else "failed", reason)
            return
        if (parts := asked.parts_in(frame)) is None:
            return  # to an earlier turn
        try:
            sum.collector.take(silo, parts)
        except FedloomError as error:
            self._lose(sum, asked, silo, "rejected", str(error))
            return
        if asked.turn is Turn.MASKED:
            egress, nothing = (
                sum.summed.egress(asked.round, silo, frame.size, frame.sha256),
                Update(silo, asked.round, {}, {}),
            )
            number = self._silos.index(silo)
            sum.results[silo] = Result(number, nothing, egress, SiloState(), {}, 0, answer.seconds)
            self._journal(Event(asked.round, silo, "answered", "", answer.seconds, frame.size))

    def _lose(self, sum: _Sum, asked: Asked, silo: str, event: Departure, reason: str) -> None:
        """A silo has dropped out of the sum: it is asked nothing more in it, and must not pay for what nobody takes."""
        sum.gone[silo] = reason
        self._wire.withdraw(silo, asked.round)
        self._journal(Event(asked.round, silo, event, reason))

    def _genuine(self, silo: str, words: bytes, signature: bytes) -> bool:
        return is_signed(words, signature, self._keys.get(silo, b"").strip())
