"""Packing: several runs in one fused engine, each of which ends as it would have ended alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from engines.one_answer import (
    FISSION,
    METHODS,
    MIXED,
    UNEQUAL,
    Rounds,
    assert_same_rounds,
    config_of,
    lived_together,
    pack_of,
    rounds_of,
    trainer_of,
)
from fedloom.engines.base import Job
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_support import UnsupportedError
from fedloom.federation.rounds import RoundContext
from fedloom.objectives.base import Losses
from fedloom.sharing.update import DivergedError

IN_CHUNKS = FusedOptions(torch.device("cpu"), chunk=4)
# Other participants in every run; nobody in one of the rounds.
ATTENDANCE: tuple[Rounds, ...] = (((1, 3), (0, 1, 2, 3, 4)), ((0, 2, 4), ()), ((0, 1, 2, 3, 4), (1, 3)), ((2,), (3,)))


@pytest.mark.parametrize(
    ("runs", "stacks"),
    [
        ([("seed=1",), ("seed=2",), ("seed=1", "sharing.weights=equal-groups")], 1),
        ([("seed=1",), (FISSION, "seed=2"), ("seed=3", *METHODS["+L"]), ("seed=1", *METHODS["+L+D"])], 1),
        ([(FISSION, "method.prior=random", f"seed={seed}") for seed in (4, 5)], 1),
        (
            [
                ("seed=1", *METHODS["private encoder, kept moments"]),
                ("seed=2", *METHODS["private encoder, kept moments"]),
            ],
            1,
        ),
        ([("seed=1",), ("seed=1", *METHODS["+H+L+D"]), ("seed=2",), ("seed=2", "local.learning_rate=1e-2")], 3),
        ([("seed=1", *METHODS["fedgan"]), ("seed=2", *METHODS["fedgan"])], 1),
    ],
    ids=["seeds", "methods and priors", "random priors", "private blocks", "unlike runs", "two phases"],
)
def test_packed_equals_alone(runs: list[tuple[str, ...]], stacks: int) -> None:
    engine, members = pack_of(UNEQUAL, *runs, options=IN_CHUNKS)
    assert f"{stacks} stack" in engine.describe()
    assert f"{len(runs)} runs packed" in engine.describe()
    attendance = ATTENDANCE[: len(runs)]
    together = lived_together(engine, [start for _, start in members], attendance)
    for (trainer, start), attended, ours in zip(members, attendance, together, strict=True):
        alone = rounds_of(FusedEngine(trainer, IN_CHUNKS), start, attended)
        assert_same_rounds(start, ours, alone, tolerance=1e-3)


def test_groups_inside_a_silo() -> None:
    """FedVAE and +D agree on silos of one group, and differ where +D has branches."""
    engine, members = pack_of(MIXED, ("seed=1",), (FISSION, "seed=2"), options=IN_CHUNKS)
    assert "2 stacks" in engine.describe()
    together = lived_together(engine, [start for _, start in members], ATTENDANCE[:2])
    for (trainer, start), attended, ours in zip(members, ATTENDANCE[:2], together, strict=True):
        assert_same_rounds(start, ours, rounds_of(FusedEngine(trainer, IN_CHUNKS), start, attended), tolerance=1e-3)


def test_a_run_that_diverges_leaves_the_others_alone() -> None:
    """All three share a stack and a chunk; the one in the middle has weights that are not finite."""
    engine, members = pack_of(UNEQUAL, ("seed=1",), ("seed=2",), ("seed=3",), options=replace(IN_CHUNKS, chunk=15))
    states = [start for _, start in members]
    for tensors in states[1].server.blocks.values():
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
    context = RoundContext(1, 9, (0, 1, 2, 3, 4))
    outcomes = engine.rounds({run: Job(state, context, lambda _: None) for run, state in enumerate(states)})
    assert isinstance(outcomes[1], DivergedError)
    for run in (0, 2):
        ours = outcomes[run]
        assert not isinstance(ours, Exception)
        wanted, reports, _ = rounds_of(FusedEngine(members[run][0], IN_CHUNKS), states[run], ((0, 1, 2, 3, 4),))
        assert_same_rounds(states[run], (ours[0], [ours[1]], []), (wanted, reports, []), tolerance=1e-3)


def test_runs_of_one_federation_share_its_records() -> None:
    engine, _ = pack_of(UNEQUAL, ("seed=1",), ("seed=2",), options=IN_CHUNKS)
    assert [len(stack.table.records) for stack in engine._stacks] == [sum(map(len, UNEQUAL.silos))]


def test_records_of_different_modality_lie_in_tables_of_their_own() -> None:
    """Equal dtype, equal shape, equal models: all that differs is what the numbers are."""
    silos = tuple(replace(silo, train=replace(silo.train, kind="vector")) for silo in UNEQUAL.silos)
    vectors = replace(UNEQUAL, silos=silos, test=replace(UNEQUAL.test, kind="vector"))
    trainers = [trainer_of(config_of("seed=1"), federation)[0] for federation in (UNEQUAL, vectors)]
    engine = FusedEngine(trainers[0], IN_CHUNKS, packed=trainers[1:])
    assert sorted(
        (stack.table.records.modality.name, {member.silo.train.modality.name for member in stack.members})
        for stack in engine._stacks
    ) == [("image", {"image"}), ("vector", {"vector"})]


@dataclass(frozen=True)
class Attentive:
    """Looks at who takes part."""

    noise = {}  # noqa: RUF012

    def __call__(self, model, step):
        batch = step.batch
        values = model.encode(batch.x, batch.group).mean.square().sum(dim=1) * (1 + len(step.context.participants))
        return Losses(values, {})


def test_an_objective_that_looks_at_the_participants_is_not_packed() -> None:
    trainers = []
    for seed in (1, 2):
        trainer, _ = trainer_of(config_of(f"seed={seed}"), UNEQUAL)
        phases = (replace(trainer.method.phases[0], objective=Attentive()),)
        trainers.append(replace(trainer, method=replace(trainer.method, phases=phases)))
    FusedEngine(trainers[0], IN_CHUNKS)
    with pytest.raises(UnsupportedError, match="phase 'vae' looks at who takes part"):
        FusedEngine(trainers[0], IN_CHUNKS, packed=trainers[1:])
