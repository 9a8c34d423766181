"""However many ranks carry out a round, what comes of it has the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engines.one_answer import LARGER, METHODS, PRIVATE, Lived, config_of, rounds_of, trainer_of
from engines.ranks_here import ranked
from fedloom.engines.base import FederationState, Job, RoundReport
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.pieces import Divisible, RoundPart, RoundPiece, shares_of
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.federation.rounds import RoundContext
from fedloom.privacy.noise import keyed
from fedloom.runs.stacks import Distant
from support import equal_bits

# A silo that sits out a round trains on another rank in the next one.
ATTENDANCE = ((0, 1, 2, 3, 4), (1, 3, 4), (0, 1, 2, 3, 4))
ENGINES: dict[str, Callable[[Trainer], Divisible]] = {
    "reference": ReferenceEngine,
    "fused": lambda trainer: FusedEngine(trainer, FusedOptions(torch.device("cpu"), chunk=2)),
}
WITH_NOISE = {
    "dp": (),
    "dp, private encoder, kept moments": METHODS["private encoder, kept moments"],
    "dp, bounds that move": ("privacy.clipping=quantile",),
    "dp of histograms": METHODS["align_fl of a histogram"],
}
QUICK = ("fedvae", "+D", "private encoder, kept moments", "branches of two architectures", "fedgan", "equal groups")
CASES = {**METHODS, **{name: (*PRIVATE, *overrides) for name, overrides in WITH_NOISE.items()}}
MARKED = [name if name in {*QUICK, *WITH_NOISE} else pytest.param(name, marks=pytest.mark.system) for name in CASES]


def assert_same_bits(ours: Lived, wanted: Lived) -> None:
    (our_state, our_reports, our_results), (state, reports, results) = ours, wanted
    for found, expected in (
        (our_state.server.blocks, state.server.blocks),
        (our_state.server.averages, state.server.averages),
    ):
        assert found.keys() == expected.keys()
        assert all(equal_bits(found[key], tensors) for key, tensors in expected.items())
    assert equal_bits(our_state.server.memory, state.server.memory)
    assert our_state.silos.keys() == state.silos.keys()
    assert all(equal_bits(our_state.silos[silo].tensors, kept.tensors) for silo, kept in state.silos.items())
    assert our_reports == reports
    assert sorted(result.silo for result in our_results) == sorted(result.silo for result in results)


@pytest.mark.parametrize("method", MARKED)
def test_ranks_change_no_bit(method: str, tmp_path: Path) -> None:
    """One engine on two ranks, the other one on four, in turns."""
    config = config_of("local.epochs=1", *CASES[method])
    start = trainer_of(config, LARGER)[1]
    for size, engine in zip((2, 4) if len(method) % 2 else (4, 2), ENGINES.values(), strict=True):

        def make(engine: Callable[[Trainer], Divisible] = engine) -> Divisible:
            return engine(trainer_of(config, LARGER)[0])

        alone = rounds_of(make(), start, ATTENDANCE)
        with ranked(make, size, tmp_path) as (ours, _):
            assert_same_bits(rounds_of(ours, start, ATTENDANCE), alone)


def test_what_silos_keep_stays_where_they_train_and_moves_with_them(tmp_path: Path) -> None:
    """By steps 8 and 4 against 6, 4 and 2; whoever trains alone does so on the first rank."""
    trainer, start = trainer_of(config_of(*METHODS["private encoder, kept moments"]), LARGER)
    everybody = (0, 1, 2, 3, 4)
    with ranked(lambda: ReferenceEngine(trainer), 2, tmp_path) as (engine, ranks):
        state, _, _ = rounds_of(engine, start, [everybody, everybody])
        assert ranks.asked == ["order", "order"]
        distant = {silo for silo, kept in state.silos.items() if isinstance(kept.source, Distant)}
        assert distant == {0, 2, 3}
        state, _, _ = rounds_of(engine, state, [(2,)])
        assert ranks.asked[2:] == ["state", "forget"]
        assert not isinstance(state.silos[2].source, Distant)
        assert isinstance(state.silos[3].source, Distant)


def test_pieces_are_dealt_by_their_steps() -> None:
    pieces = [RoundPiece((silo,), steps) for silo, steps in enumerate([2, 7, 3, 3, 1])]
    assert shares_of(pieces, 1) == [[0, 1, 2, 3, 4]]
    assert shares_of(pieces, 2) == [[1, 4], [0, 2, 3]]
    assert shares_of(pieces[:2], 4) == [[1], [0], [], []]


def test_secrets_cross_to_the_ranks(tmp_path: Path) -> None:
    """What hides a silo's records is its own key, wherever it trains."""
    trainer, start = trainer_of(config_of(*PRIVATE, "privacy.noise=secure"), LARGER)
    secrets = {silo: keyed(b"a secret", str(silo)) for silo in range(5)}
    job = Job(start, RoundContext(1, 1, (0, 1, 2, 3, 4)), lambda _: None, secrets)
    alone, _ = ReferenceEngine(trainer).round(job)
    with ranked(lambda: ReferenceEngine(trainer), 3, tmp_path) as (engine, _):
        found, _ = engine.round(job)
    assert all(equal_bits(found.server.blocks[key], tensors) for key, tensors in alone.server.blocks.items())


class Noting(ReferenceEngine):
    """Trains nobody, and notes in which order parts are put together; the last piece is the longest."""

    order: tuple[int, ...] = ()

    def pieces(self, job: Job) -> list[RoundPiece]:
        return [RoundPiece((silo,), 1 + silo) for silo in job.context.participants]

    def carry_out(self, job: Job, pieces: Sequence[int]) -> list[RoundPart]:
        return [RoundPart(number, []) for number in pieces]

    def concluded(self, job: Job, parts: Sequence[RoundPart]) -> tuple[FederationState, RoundReport]:
        self.order = tuple(part.piece for part in parts)
        return super().concluded(job, parts)


def test_parts_are_put_together_in_the_order_of_their_pieces(tmp_path: Path) -> None:
    """Whichever comes first: sums of floating-point numbers depend on it."""
    trainer, start = trainer_of(config_of(), LARGER)
    leader, other = Noting(trainer), Noting(trainer)
    engines = iter([other, leader])
    with ranked(lambda: next(engines), 2, tmp_path) as (engine, _):
        engine.round(Job(start, RoundContext(1, 1, (0, 1, 2)), lambda _: None))
    assert shares_of(leader.pieces(Job(start, RoundContext(1, 1, (0, 1, 2)), lambda _: None)), 2) == [[2], [0, 1]]
    assert leader.order == (0, 1, 2)
