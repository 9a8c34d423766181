"""An engine on several ranks: each carries out some pieces of a round, and the leader puts their parts together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fedloom.engines.base import FederationState, Job, Result, RoundReport, SiloState
from fedloom.engines.crossing import ORDER, answer, answered, order, ordered, packed_blocks
from fedloom.engines.pieces import Divisible, RoundPart, shares_of
from fedloom.engines.ranks import LEADER, Ranks
from fedloom.engines.remote.frames import STATE, Frame
from fedloom.errors import FedloomError
from fedloom.runs.stacks import Distant, Overflow
from fedloom.sharing.codec import packed, unpacked
from fedloom.sharing.plan import Tensors
from fedloom.sharing.update import DivergedError

FORGET, FAILED, END = "forget", "failed", "end"


class RankedEngine:
    """The leader's; what a silo keeps stays with the rank that trained it, until another one does or somebody looks."""

    def __init__(self, engine: Divisible, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks

    def describe(self) -> str:
        """The engine of each rank, and how many there are."""
        return f"{self._engine.describe()}, on {self._ranks.size} rank" + "s" * (self._ranks.size > 1)

    def choice(self) -> dict[str, Any]:
        """The number of ranks changes no bit."""
        return self._engine.choice()

    def round(self, job: Job) -> tuple[FederationState, RoundReport]:
        """Send pieces out, do the leader's own, and put together what comes back, in the order of the pieces."""
        pieces = self._engine.pieces(job)
        shares = shares_of(pieces, self._ranks.size)
        homes = {silo: rank for rank, share in enumerate(shares) for number in share for silo in pieces[number].silos}
        moved = self._moved(job.state, homes)
        blocks = packed_blocks(job.state.server)
        asked = [rank for rank, share in enumerate(shares) if share and rank != LEADER]
        for rank in asked:
            own = [silo for number in shares[rank] for silo in pieces[number].silos]
            states = {silo: moved[silo] for silo in own if silo in moved}
            secrets = {silo: job.secrets[silo] for silo in own if silo in job.secrets}
            self._ranks.tell(rank, order(replace(job, secrets=secrets), shares[rank], states, blocks))
        here = replace(job.state, silos={**job.state.silos, **moved})
        parts, failures = list[RoundPart](), list[FedloomError]()
        try:
            parts += self._engine.carry_out(replace(job, state=here), shares[LEADER])
        except FedloomError as error:
            failures.append(error)
        for rank in asked:  # of a round that failed too: nobody must be left speaking
            try:
                parts += self._heard(rank, job)
            except FedloomError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return self._engine.concluded(job, sorted(parts, key=lambda part: part.piece))

    def close(self) -> None:
        """Of the leader's own engine; the ranks may be asked for another round by another one."""
        self._engine.close()

    def _moved(self, state: FederationState, homes: Mapping[int, int]) -> dict[int, SiloState]:
        """What silos keep that now train on another rank than where it lies; fetched before all are at work."""
        found = {}
        for silo, home in homes.items():
            source = state.silos.get(silo, SiloState()).source
            if isinstance(source, Distant) and source.holder != home:
                found[silo] = SiloState(dict(source.items()))
                self._ranks.tell(source.holder, Frame({"kind": FORGET, "silo": silo}))
            elif not isinstance(source, Distant) and source and home != LEADER:
                found[silo] = state.silos[silo]
        return found

    def _heard(self, rank: int, job: Job) -> list[RoundPart]:
        frame = self._ranks.hear(rank)
        if frame.kind == FAILED:
            raise (DivergedError if frame.header["diverged"] else FedloomError)(frame.header["reason"])
        parts = answered(frame, lambda silo, names: SiloState(Distant(names, rank, partial(self._fetch, rank, silo))))
        for part in parts:
            for result in part.results:
                job.on_silo(result)
        return parts

    def _fetch(self, rank: int, silo: int) -> Tensors:
        self._ranks.tell(rank, Frame({"kind": STATE, "silo": silo}))
        return unpacked(self._ranks.hear(rank).parts[STATE], "what a silo keeps")


def dismiss(ranks: Ranks) -> None:
    """Let all others go; where the leader ends without a word they go as well."""
    for rank in range(1, ranks.size):
        ranks.tell(rank, Frame({"kind": END}))


def follow(ranks: Ranks, engine: Divisible, overflow: Overflow) -> None:
    """Do what the leader asks until it says that this is the end; what silos keep lies here meanwhile."""
    kept: dict[int, SiloState] = {}
    try:
        while (frame := ranks.hear(LEADER)).kind != END:
            if frame.kind == ORDER:
                ranks.tell(LEADER, _carried_out(frame, engine, kept, overflow))
            elif frame.kind == STATE:
                ranks.tell(LEADER, Frame({"kind": STATE}, {STATE: packed(kept[frame.header["silo"]].tensors)}))
            elif frame.kind == FORGET:
                del kept[frame.header["silo"]]
    finally:
        engine.close()


def _carried_out(frame: Frame, engine: Divisible, kept: dict[int, SiloState], overflow: Overflow) -> Frame:
    def on_silo(result: Result) -> None:
        overflow.admit(result.state)

    job, pieces = ordered(frame, kept, on_silo)
    try:
        made = engine.carry_out(job, pieces)
    except FedloomError as error:
        return Frame({"kind": FAILED, "reason": str(error), "diverged": isinstance(error, DivergedError)})
    kept |= {result.silo: result.state for part in made for result in part.results if result.state}
    return answer(made)
