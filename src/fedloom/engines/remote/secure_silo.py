"""A silo's half of rounds in which the server sees sums alone: it answers turn by turn, and pays when numbers leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fedloom.engines.base import Result
from fedloom.engines.charging import shares_noise
from fedloom.engines.masked_sums import MaskedSum, SummedRounds, terms_of
from fedloom.engines.remote.assignments import Assignment, Prepared
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.secure_frames import SECURE, Asked
from fedloom.engines.remote.silo import SiloService
from fedloom.engines.remote.work import TASK, RefusedError
from fedloom.operations.spending import refuse_held
from fedloom.privacy.signatures import fingerprint, is_signed
from fedloom.secure.party import Party
from fedloom.secure.terms import Genuine, Parts, SecureSumError, Turn


@dataclass(frozen=True, eq=False)
class SumTask:
    """A sum that this silo has a part in, with the task that its first turn brought."""

    asked: Asked  # that turn
    task: Frame
    summed: MaskedSum
    party: Party  # whose keys are in memory alone


class SecureSiloService(SiloService):
    """Answers turns of secure sums too.

    It is in one sum at a time. A new one takes the place of the last; a silo that was started again is in none.
    """

    _sum: SumTask | None = None

    def _answered(self, frame: Frame, came: float) -> Frame:
        if frame.kind != SECURE:
            return super()._answered(frame, came)
        try:
            asked = Asked.of(frame)
            if asked.turn is Turn.KEYS:
                return self._begun(asked, frame)
            party, parts = self._known(asked).party, dict(frame.parts)
            if asked.turn is Turn.MASKED:
                return self._sent(asked, parts, came)
            turns: Mapping[Turn, Callable[[Parts], Parts]] = {
                Turn.SHARES: party.shares,
                Turn.CONSENT: party.consent,
                Turn.REVEAL: party.reveal,
            }
            return asked.answered(turns[asked.turn](parts))
        except SecureSumError as error:  # of the protocol alone: nothing in it tells of records or disks
            raise RefusedError(str(error)) from error

    def _known(self, asked: Asked) -> SumTask:
        found = self._sum
        if found is None:
            raise RefusedError(f"silo '{self._silo.name}' is in no secure sum: it was started again since")
        if (asked.run, asked.round, asked.attempt) != (found.asked.run, found.asked.round, found.asked.attempt):
            raise RefusedError(f"silo '{self._silo.name}' is in another secure sum by now")
        return found

    def _begun(self, asked: Asked, frame: Frame) -> Frame:
        """The first turn: all that can be refused is refused before there are keys."""
        header = {name: value for name, value in frame.header.items() if name != "turn"}
        task = Frame({**header, "kind": TASK}, frame.parts)
        assignment = self._assignment(task)
        order, plan, trainer = assignment.order, assignment.prepared.privacy, assignment.prepared.trainer
        if plan is None or not shares_noise(order.config):
            raise RefusedError("a secure sum is for experiments with privacy.trust = 'distributed'")
        summed = SummedRounds(order.config, self._federation, trainer.method, plan).of(order.context.round)
        silos = [silo.name for silo in self._federation.silos]
        terms = terms_of(order.config, silos, order.run, order.context, asked.attempt, summed)
        genuine = self._genuine(frame.header.get("registered"), assignment.prepared)
        self._require_payable(assignment)
        # The registered key is not here: what is to be signed leaves as words, and is signed on its way.
        party = Party(terms, self._silo.name, lambda words: words, genuine)
        self._sum = SumTask(asked, task, summed, party)
        return asked.answered(party.keys())

    def _require_payable(self, assignment: Assignment) -> None:
        """Others pay for a sum that is given up, too: who cannot pay has no part in it."""
        refuse_held(self._home)
        ledger = self.ledger(assignment.prepared.grant)
        try:
            ledger.require(self._silo.name, assignment.prepared.events(assignment.order.context.round))
        finally:
            ledger.close()

    def _genuine(self, registered: object, prepared: Prepared) -> Genuine:
        """By keys that the server hands out, and that this silo's operator knows by their fingerprints."""
        lines = {str(n): str(k).encode() for n, k in registered.items()} if isinstance(registered, Mapping) else {}
        known = prepared.grant.silos
        for silo in (silo.name for silo in self._federation.silos if silo.name != self._silo.name):
            if silo not in known:
                raise RefusedError(
                    f"silo '{self._silo.name}' does not agree: policy.toml names no key of silo '{silo}' (silos), and "
                    "silos that share noise must know each other's"
                )
            if silo in lines and fingerprint(lines[silo]) != known[silo]:
                raise RefusedError(f"silo '{self._silo.name}' knows silo '{silo}' by another key than the server's")
        return lambda silo, words, signature: is_signed(words, signature, lines.get(silo, b""))

    def _sent(self, asked: Asked, letters: Parts, came: float) -> Frame:
        """The silo's numbers, paid for before they are made; every attempt is a release of its own."""
        found = self._known(asked)
        found.party.check_due(Turn.MASKED)  # before anything is paid
        assignment = self._assignment(found.task)
        results: list[Result] = []

        def make() -> Frame:
            task = replace(assignment.task, step=found.summed.step)
            results.append(self._trained(replace(assignment, task=task)))
            return asked.answered(found.party.masked(letters, found.summed.integers(results[0].update)))

        def store(answer: Frame) -> None:
            egress = found.summed.egress(asked.round, self._silo.name, answer.size, answer.sha256)
            self._keep(assignment, results[0], egress, answer)

        with self._pacemaker.kept(came, assignment.prepared.grant.pace):
            answer = self._released(assignment, None, make, store, repeatable=False)
            self._report(assignment)
        return answer
