"""Updates that travel compressed: by which engine does not matter, nothing is lost for good, and no record shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.one_answer import (
    EVEN,
    LARGER,
    MIXED,
    PRIVATE,
    ROUNDS,
    UNEQUAL,
    assert_same_rounds,
    config_of,
    pack_of,
    rounds_of,
    trainer_of,
)
from fedloom.engines import reference
from fedloom.engines.base import FederationState, SiloState, received_by, site_of
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.local_state import RESIDUE, LocalState
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.remote.rounds import RemoteEngine
from fedloom.engines.remote.rules import RoundRules
from fedloom.errors import ConfigError
from fedloom.federation.rounds import RoundContext
from fedloom.sharing.codec import under
from fedloom.sharing.compression import Compressed, Compression, coded, decoded, moved
from fedloom.sharing.plan import Tensors

CPU = torch.device("cpu")
INT8 = "sharing.compression=int8"
KINDS: tuple[Compression, ...] = ("bfloat16", "int8")


def test_what_rounding_leaves_out_is_sent_later() -> None:
    """Steps of 0.01, and a move of 0.4 of them in every round: nothing, once one, nothing, once more, nothing, once."""
    weights, down = {"body.w": torch.zeros(1, 2)}, {"body.w": torch.zeros(1, 2)}
    state = LocalState((), weights, (), weights, compressed=Compressed("int8", ("body",)))
    sent, kept = [], Tensors()
    for _ in range(5):
        weights["body.w"][0] = torch.tensor([1.27, 0.004])
        codes = state.compress(down, 1)
        sent.append(codes["body.w"][0, 1].item())
        (kept,) = (each.tensors for each in state.kept(1))
        assert torch.equal(weights["body.w"], decoded(codes)["body.w"]), "the silo goes on with what the server has"
    assert sent == [0, 1, 0, 1, 0]
    # 5 x 0.004 moved, 2 x 0.01 sent: nothing is left, and of the first value never anything was.
    assert kept[RESIDUE + "body.w"].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_over_rounds_all_moves_arrive_but_the_last_remainder(kind: Compression) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = {"body.w": torch.zeros(3, 50)}
    state = LocalState((), weights, (), weights, compressed=Compressed(kind, ("body",)))
    moves, sums, most = torch.zeros(3, 50), torch.zeros(3, 50), torch.zeros(3, 1)
    for _ in range(10):
        down = {"body.w": torch.randn(3, 50, generator=generator)}
        move = torch.randn(3, 50, generator=generator)
        weights["body.w"].copy_(down["body.w"] + move)
        state.compress(down, 3)
        moves, sums = moves + move, sums + weights["body.w"] - down["body.w"]
        most = (move.abs() + 0.1).amax(dim=1, keepdim=True)
    left = torch.stack([each.tensors[RESIDUE + "body.w"] for each in state.kept(3)])
    assert torch.allclose(moves - sums, left, atol=1e-5)
    assert (left.abs() <= most / 127 / 2 * ROOM if kind == "int8" else left.abs() <= most / 256 * ROOM).all()


ROOM = 1.5  # the move that was rounded last had the remainder before it on top


def learned(config: tuple[str, ...], federation: Any, *, fused: bool) -> tuple[FederationState, Any]:
    trainer, start = trainer_of(config_of(*config), federation)
    engine = FusedEngine(trainer, FusedOptions(CPU, chunk=3)) if fused else ReferenceEngine(trainer)
    return start, rounds_of(engine, start, ROUNDS)


@pytest.mark.parametrize(
    ("config", "federation"),
    [
        (("method.name=fissionvae", INT8), MIXED),
        (("method.name=fissionvae", "sharing.compression=bfloat16", "server.merge.name=median"), UNEQUAL),
        ((*PRIVATE, INT8), LARGER),
    ],
    ids=["groups", "median", "dp-sgd"],
)
def test_both_engines_send_the_same(config: tuple[str, ...], federation: Any) -> None:
    """Up to rounding, which may fall to either side: what comes of a silo's remainders is compared by the sums."""
    config = (*config, "sharing.weights=equal")
    start, wanted = learned(config, federation, fused=False)
    _, ours = learned(config, federation, fused=True)

    def bare(lived: Any) -> Any:
        state, reports, results = lived
        silos = {silo: SiloState(_without_residues(kept.tensors)) for silo, kept in state.silos.items()}
        assert all(under(RESIDUE, kept.tensors) for kept in state.silos.values())
        return replace(state, silos=silos), reports, results

    assert_same_rounds(start, bare(ours), bare(wanted), tolerance=0.02)


def _without_residues(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(RESIDUE)}


def test_runs_of_other_compression_train_apart() -> None:
    engine, _ = pack_of(EVEN, (), (INT8,), options=FusedOptions(CPU))
    assert [{member.run for member in stack.members} for stack in engine._stacks] == [{0}, {1}]


@pytest.mark.parametrize(("kind", "number"), [("none", 4), ("bfloat16", 2), ("int8", 1)])
def test_the_bytes_are_those_that_travel(kind: str, number: int) -> None:
    trainer, start = trainer_of(config_of(f"sharing.compression={kind}"), UNEQUAL)
    _, (report,), (result,) = rounds_of(ReferenceEngine(trainer), start, ((1,),))
    tensors = [tensor for block in result.update.blocks.values() for tensor in block.values()]
    steps = 4 * len(tensors) if kind == "int8" else 0
    counts = 8 * 2  # of all records, and of those of its group
    assert report.egress[0].bytes == number * sum(tensor.numel() for tensor in tensors) + steps + counts


def test_workers_send_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, start = trainer_of(config_of(INT8), UNEQUAL)
    monkeypatch.setattr(reference, "_trainer", trainer, raising=False)
    (task,) = ReferenceEngine(trainer).tasks(start, RoundContext(1, 2, (1,)))
    here, there = trainer.train(task), reference._unpacked(*reference._train_in_worker(*reference._packed(task)))
    assert there.egress.bytes == here.egress.bytes
    for key, tensors in here.update.blocks.items():
        assert all(torch.equal(there.update.blocks[key][name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_under_dp_what_leaves_follows_from_noised_weights_alone(kind: Compression) -> None:
    """Of two rounds, also what rounding left out: made from weights that could have been sent as they are."""
    plain, start = trainer_of(config_of(*PRIVATE), LARGER)
    compressing, _ = trainer_of(config_of(*PRIVATE, f"sharing.compression={kind}"), LARGER)
    plan, site, silo = compressing.method.plan, site_of(compressing.federation, 1), 1
    state, left = start, Tensors()
    for number in (1, 2):
        received = received_by(plan, state.server, site)
        _, _, (noised,) = rounds_of(ReferenceEngine(plain), replace(state, silos={}), ((silo,),))
        state, _, (sent,) = rounds_of(ReferenceEngine(compressing), state, ((silo,),))
        weights = plan.join(noised.update.blocks, site)
        moves = {n: (weights[n] - received[n] + left.get(n, torch.zeros(()))).unsqueeze(0) for n in weights}
        codes = coded(kind, moves)
        left = {name: (moves[name] - move)[0] for name, move in decoded(codes).items()}
        wanted = moved(kind, received, {name: code[0] for name, code in codes.items()}, weights)
        ours = plan.join(sent.update.blocks, site)
        assert all(torch.equal(ours[name], wanted[name]) for name in wanted), f"round {number}"
        kept = under(RESIDUE, state.silos[silo].tensors)
        assert kept.keys() == left.keys()
        assert all(torch.equal(kept[name], left[name]) for name in left)


def test_where_it_makes_no_sense_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to compress: method 'align_fl' averages no block that comes down"):
        trainer_of(config_of("method.name=align_fl", INT8), UNEQUAL)
    shared = (*PRIVATE, "privacy.trust=distributed", "local.steps=1", "local.optimizer=sgd", "sharing.weights=equal")
    with pytest.raises(ConfigError, match=r"under privacy\.trust = 'distributed' silos send whole numbers"):
        trainer_of(config_of(*shared, INT8), LARGER)
    trainer, _ = trainer_of(config_of(INT8), UNEQUAL)
    wire: Any = None
    with pytest.raises(ConfigError, match=r"rounds.stragglers = 'use' .* sends how far they moved; use 'drop'"):
        RemoteEngine(trainer, "run", wire, RoundRules(stragglers="use"), {}, lambda event: None)
