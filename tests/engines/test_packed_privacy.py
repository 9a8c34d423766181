"""Packs under DP-SGD: noise, clip bounds, samples and costs of a silo are those of its own run, as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.one_answer import (
    ALIGN,
    DISTIL,
    LARGER,
    METHODS,
    PRIVATE,
    Rounds,
    assert_alike,
    assert_same_rounds,
    config_of,
    image_federation,
    lived_together,
    rounds_of,
    trainer_of,
)
from fedloom.engines import fused, fused_private
from fedloom.engines.base import FederationState, Job, Outcome
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_noise import DeviceNoise, HostNoise
from fedloom.engines.fused_stack import Member, stacks_of
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment, run_together
from fedloom.federation.records import Federation, Records, Silo
from fedloom.federation.rounds import RoundContext
from fedloom.privacy.ledger import Ledger
from support import federation_of

CPU = torch.device("cpu")
IN_CHUNKS, ALL_AT_ONCE = (FusedOptions(CPU, chunk=chunk) for chunk in (3, 15))
EVERYBODY = (0, 1, 2, 3, 4)
# Other participants in every run; nobody in one of the rounds.
ATTENDANCE: tuple[Rounds, ...] = ((EVERYBODY, (1, 3)), ((0, 2, 4), ()), ((1, 2), EVERYBODY))
OTHER_RATES = image_federation({"a0": 9, "b0": 8, "a1": 30, "b1": 13, "a2": 11})
EQUAL = image_federation({"a0": 16, "b0": 16, "a1": 16, "b1": 16, "a2": 16})
TWO = ("seed=1",), ("seed=2",)
TWO_NOISES = ("seed=1",), ("seed=2", "privacy.noise_multiplier=3")


def vectors() -> Federation:
    """Labelled vectors."""
    generator, silos = torch.Generator().manual_seed(4), []
    for number, size in enumerate((12, 27, 17, 8, 16)):
        x, y = torch.rand(size, 6, generator=generator), torch.arange(size) % 3
        silos.append(Silo(f"silo-{number}", Records(x, y, torch.zeros(size, dtype=torch.int64))))
    return Federation("vectors", tuple(silos), silos[0].train, ("all",), ("ant", "bee", "cat"))


VECTORS = vectors()


def settings(*each: str) -> tuple[tuple[str, ...], ...]:
    """Runs that differ in one setting."""
    return tuple((one,) for one in each)


def with_epsilons(*budgets: float) -> tuple[tuple[str, ...], ...]:
    return tuple(("privacy.noise_multiplier=0", f"privacy.epsilon={epsilon}") for epsilon in budgets)


def with_subjects(federation: Federation) -> Federation:
    silos = [
        replace(silo, train=replace(silo.train, subject=torch.arange(len(silo)) // 2)) for silo in federation.silos
    ]
    return replace(federation, silos=tuple(silos))


def packed(
    federations: Sequence[Federation], runs: Sequence[tuple[str, ...]], options: FusedOptions
) -> tuple[FusedEngine, list[tuple[Trainer, FederationState]]]:
    """An engine for several private runs, with their trainers and first states."""
    members = [
        trainer_of(config_of(*PRIVATE, "rounds=2", *overrides), federation)
        for federation, overrides in zip(federations, runs, strict=True)
    ]
    trainers = [trainer for trainer, _ in members]
    return FusedEngine(trainers[0], options, packed=trainers[1:]), members


def assert_packed_equals_alone(
    federations: Sequence[Federation],
    runs: Sequence[tuple[str, ...]],
    options: FusedOptions,
    attendance: Sequence[Rounds] = ATTENDANCE,
) -> FusedEngine:
    """After rounds of the whole pack, every run is where it would be alone."""
    engine, members = packed(federations, runs, options)
    attendance = attendance[: len(runs)]
    together = lived_together(engine, [start for _, start in members], attendance)
    for (trainer, start), attended, ours in zip(members, attendance, together, strict=True):
        assert_same_rounds(start, ours, rounds_of(FusedEngine(trainer, options), start, attended), tolerance=1e-3)
    return engine


@pytest.mark.parametrize(
    ("federation", "common", "runs"),
    [
        (LARGER, (), settings("seed=1", "seed=2", "seed=3")),
        (EQUAL, ("privacy.allocation=late",), with_epsilons(1, 4, 16)),
        # Adam would not see by how much a whole sum is scaled.
        (LARGER, METHODS["sgd"], settings("privacy.clip=0.02", "privacy.clip=2")),
        # The first and the last also go on from their own bounds.
        (
            LARGER,
            (*METHODS["sgd"], "privacy.clipping=quantile"),
            settings("privacy.clip=0.02", "privacy.clip=2", "privacy.clip=0.3"),
        ),
        (LARGER, ("privacy.clipping=median",), TWO),
        (LARGER, METHODS["fedprox"], (("seed=1", "privacy.clip=0.5"), ("seed=2",))),
        (LARGER, METHODS["private encoder, kept moments"], TWO),
        (LARGER, (ALIGN, *DISTIL), TWO_NOISES),
        (LARGER, (ALIGN, *DISTIL, "privacy.blocks=['decoder']"), TWO),
        (LARGER, (ALIGN, *DISTIL, "model.lipschitz=2.0"), TWO),
        (LARGER, METHODS["align_fl of a histogram"], TWO_NOISES),
        (VECTORS, ("method.name=dp_cvae", "method.labels=global-dp"), TWO_NOISES),
        (
            VECTORS,
            ("method.name=dp_cgan", "method.generator_hidden=[8]", "method.discriminator_hidden=[8]"),
            (("seed=1",), ("seed=2", "privacy.noise_multiplier=3", "privacy.clip=0.5")),
        ),
        (with_subjects(LARGER), ("privacy.unit=subject", "local.batch_size=3"), TWO),
        (EQUAL, (*METHODS["sgd"], "local.steps=1"), (("privacy.trust=distributed",), ("seed=2",))),
    ],
    ids=[
        "seeds",
        "epsilons, noise by round",
        "thresholds",
        "first thresholds of a quantile",
        "medians",
        "gradients written out",
        "private blocks, kept moments",
        "align-fl",
        "align-fl, decoders alone",
        "align-fl, certified decoders",
        "align-fl with a payload",
        "dp-cvae",
        "dp-cgan",
        "subjects",
        "noise of all together",
    ],
)
def test_packed_equals_alone(
    federation: Federation, common: tuple[str, ...], runs: tuple[tuple[str, ...], ...]
) -> None:
    overrides = [(*common, *own) for own in runs]
    engine = assert_packed_equals_alone([federation] * len(runs), overrides, ALL_AT_ONCE)
    assert ", 1 stack of" in engine.describe()


def test_silos_of_other_sizes_have_rates_of_their_own() -> None:
    engine = assert_packed_equals_alone([LARGER, OTHER_RATES], TWO, IN_CHUNKS)
    assert ", 1 stack of" in engine.describe()


@pytest.mark.parametrize(
    "unlike",
    [("privacy.clipping=quantile",), ("privacy.blocks=['decoder']",), ("privacy.unit=subject",), ()],
    ids=["the rule of clipping", "what is guarded", "who is protected", "no privacy at all"],
)
def test_mechanisms_of_other_kinds_have_stacks_of_their_own(unlike: tuple[str, ...]) -> None:
    other = unlike or ("privacy.mechanism=none",)
    runs = [("local.batch_size=3",), ("local.batch_size=3", *other)]
    engine = assert_packed_equals_alone([with_subjects(LARGER)] * 2, runs, ALL_AT_ONCE, (((0, 1),), ((1, 2),)))
    assert ", 2 stacks of" in engine.describe()


def swapped(places: Tensor) -> Tensor:
    """Silos 0 and 1 of two runs take the places 0 to 3: what each run has goes to the other."""
    return places[..., [2, 3, 0, 1, *range(4, places.shape[-1])]]


def swap_scales(program: fused_private.PrivateProgram) -> None:
    program._scales = swapped(program._scales)


def swap_bounds(program: fused_private.PrivateProgram) -> None:
    for bounds in program._state.bounds.values():
        bounds.copy_(swapped(bounds))


def share_noise(program: fused_private.PrivateProgram) -> None:
    assert isinstance(program._source, HostNoise)
    program._source._sources[2:] = program._source._sources[:2]


@pytest.mark.parametrize("fault", [None, swap_scales, swap_bounds, share_noise])
def test_planted_faults_are_found(
    fault: Callable[[fused_private.PrivateProgram], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that swap their noise's width or their clip bounds, or share their noise: the answers differ."""
    load = fused_private.PrivateProgram.load

    def faulty(program: fused_private.PrivateProgram, members: Sequence[Member], states: Any) -> None:
        load(program, members, states)
        if fault and {member.run for member in members} == {0, 1}:
            assert [member.run for member in members] == [0, 0, 1, 1]
            fault(program)

    monkeypatch.setattr(fused_private.PrivateProgram, "load", faulty)
    sgd = METHODS["sgd"]
    runs = [(*sgd, "seed=1", "privacy.clip=0.5"), (*sgd, "seed=2", "privacy.noise_multiplier=2.5")]
    both: Rounds = ((0, 1),)
    if fault is None:
        assert_packed_equals_alone([EQUAL] * 2, runs, ALL_AT_ONCE, (both, both))
        return
    with pytest.raises(AssertionError):
        assert_packed_equals_alone([EQUAL] * 2, runs, ALL_AT_ONCE, (both, both))


def members_of(*overrides: tuple[str, ...]) -> list[Member]:
    """All silos of some runs as they lie in a stack: 8, 6, 4, 4 and 2 steps a round, so that runs alternate."""
    trainers = [trainer_of(config_of(*PRIVATE, *own), LARGER)[0] for own in overrides]
    (stack,) = stacks_of(trainers, CPU)
    return sorted(stack.members, key=lambda member: (-member.steps, member.run, member.index))


def drawn(members: Sequence[Member], active: Sequence[int], round: int = 1) -> list[dict[tuple[int, int], Tensor]]:
    """For each step and phase what every silo of a run, both by number, got of the noise of the device."""
    rooms = [torch.zeros(len(members), 40), torch.zeros(len(members), 23)]
    source, found = DeviceNoise(members, [member.trainer.seeded for member in members], round, rooms, CPU), []
    for silos in active:
        source.draw(silos)
        owners = [(member.run, member.index) for member in members[:silos]]
        found += [dict(zip(owners, room.clone(), strict=False)) for room in rooms]
    return found


def test_noise_of_the_device_is_that_of_the_run_alone() -> None:
    """To the bit, also while silos of both runs finish one after another; nobody's noise is another's."""
    two, alone = members_of(*TWO), members_of(("seed=2",))
    assert [member.run for member in two] == [0, 1, 0, 1, 0, 0, 1, 1, 0, 1]
    ours, wanted = drawn(two, [10, 8, 8, 4, 2]), drawn(alone, [5, 4, 4, 2, 1])
    for mine, own in zip(ours, wanted, strict=True):
        assert {silo for run, silo in mine if run == 1} == {silo for _, silo in own}
        for (_, silo), noise in own.items():
            assert torch.equal(mine[1, silo], noise)
    everything = [tuple(noise.tolist()) for step in ours for noise in step.values()]
    assert len(set(everything)) == len(everything) == 2 * (10 + 8 + 8 + 4 + 2)


def test_noise_of_the_device_is_never_used_twice() -> None:
    """Neither in another round, nor by those of a run's silos that train later."""
    members = members_of(*TWO)
    chunks = members[:4], members[4:]
    found = [drawn(chunk, [len(chunk)], round) for round in (1, 2) for chunk in chunks]
    everything = [tuple(noise.tolist()) for steps in found for step in steps for noise in step.values()]
    assert len(set(everything)) == len(everything) == 2 * 2 * 10


def test_noise_of_the_device_depends_on_nobody_in_the_chunk() -> None:
    """Nor on how many there are: neither packs, chunks nor ranks change what a silo draws."""
    everybody = members_of(*TWO)
    together = drawn(everybody, [10, 10])
    for chunk in (everybody[::-1], everybody[2:5], everybody[7:8]):
        for ours, theirs in zip(drawn(chunk, [len(chunk)] * 2), together, strict=True):
            assert len(ours) == len(chunk)
            assert all(torch.equal(noise, theirs[owner]) for owner, noise in ours.items())


def draw_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise as a GPU draws it."""
    load = fused_private.PrivateProgram.load

    def on_device(program: fused_private.PrivateProgram, *arguments: Any) -> None:
        program._host_noise = False
        load(program, *arguments)
        assert isinstance(program._source, DeviceNoise)

    monkeypatch.setattr(fused_private.PrivateProgram, "load", on_device)


@pytest.mark.parametrize("options", [IN_CHUNKS, ALL_AT_ONCE], ids=["chunks of 3", "one chunk"])
def test_packs_draw_on_a_device_as_runs_alone(options: FusedOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in chunks smaller than a run: they hold the silos that train together when it is alone."""
    draw_on_device(monkeypatch)
    runs = [("seed=1",), ("seed=2", "privacy.noise_multiplier=3"), ("seed=3",)]
    assert_packed_equals_alone([LARGER] * 3, runs, options)


def test_a_gradient_that_is_not_a_number_spoils_no_run() -> None:
    sound, spoilt = (federation_of([0] * 12, [1] * 12) for _ in range(2))
    spoilt.silos[1].train.x[3] = torch.nan
    engine, members = packed([sound, spoilt], [(*METHODS["fedprox"], *own) for own in TWO], ALL_AT_ONCE)
    context = RoundContext(1, 9, (0, 1))
    jobs = {run: Job(start, context, lambda _: None) for run, (_, start) in enumerate(members)}
    for outcome, (trainer, start) in zip(engine.rounds(jobs).values(), members, strict=True):
        assert not isinstance(outcome, Exception)
        wanted, reports, _ = rounds_of(FusedEngine(trainer, ALL_AT_ONCE), start, ((0, 1),))
        assert_same_rounds(start, (outcome[0], [outcome[1]], []), (wanted, reports, []), tolerance=1e-3)


class OnDevice(FusedEngine):
    """Says that it is on a GPU."""

    def choice(self) -> dict[str, Any]:
        return super().choice() | {"device": "cuda"}


CHARGES = "SELECT DISTINCT round, run FROM charges ORDER BY round"


def cramp(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Memory for so many silos at once."""
    make = fused.PrivateProgram

    def cramped(stack: Any, size: int, *rest: Any) -> fused_private.PrivateProgram:
        if size > room:
            raise torch.OutOfMemoryError
        return make(stack, size, *rest)

    monkeypatch.setattr(fused, "PrivateProgram", cramped)


@pytest.mark.filterwarnings("ignore:out of device memory")
def test_memory_that_runs_out_in_a_round_done_again_costs_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two silos at once in place of five its noise is that of the time before: it is the same release."""
    draw_on_device(monkeypatch)
    experiment = Experiment.of(config_of(*PRIVATE, "rounds=1", "privacy.noise=secure"), LARGER)
    loop, sent = experiment.begin(tmp_path / "run"), list[Outcome]()

    def crash(jobs: Mapping[int, Job]) -> dict[int, Outcome]:
        sent.append(engine.rounds(jobs)[0])
        return {0: RuntimeError("the machine went down")}

    engine = OnDevice(experiment.trainer, FusedOptions(CPU, chunk=5))
    assert str(run_together([loop], engine, crash)[0]) == "the machine went down"
    cramp(monkeypatch, room=2)
    again = experiment.take_up(loop.folder)
    engine = OnDevice(experiment.trainer, FusedOptions(CPU, chunk=5))
    assert str(run_together([again], engine, crash)[0]) == "the machine went down"
    assert engine.chunk == 2
    charges = Ledger(loop.folder.ledger, read_only=True)._rows(CHARGES)
    assert charges == [(1, f"{experiment.config.digest()}/cuda//")]
    (first, _), (second, _) = (outcome for outcome in sent if not isinstance(outcome, Exception))
    for key, block in first.server.blocks.items():
        assert_alike(second.server.blocks[key], block, again.state.server.blocks[key], tolerance=1e-3)


@pytest.mark.filterwarnings("ignore:out of device memory")
def test_a_run_goes_on_after_memory_ran_out_between_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round in which it ran out is kept at once: else earlier ones were done again with fewer silos at once.

    From that on every round would have other inputs by a last bit, and would be paid for again.
    """
    draw_on_device(monkeypatch)
    experiment = Experiment.of(config_of(*PRIVATE, "rounds=4", "engine.checkpoint_every=4"), LARGER)
    loop = experiment.begin(tmp_path / "run")
    engine = OnDevice(experiment.trainer, FusedOptions(CPU, chunk=5))

    def cramped_then_crash(jobs: Mapping[int, Job]) -> Mapping[int, Outcome]:
        number = jobs[0].context.round
        if number == 2:
            engine.close()
            cramp(monkeypatch, room=2)
        return {0: RuntimeError("the machine went down")} if number == 4 else engine.rounds(jobs)

    assert str(run_together([loop], engine, cramped_then_crash)[0]) == "the machine went down"
    again = experiment.take_up(loop.folder)
    engine = OnDevice(experiment.trainer, FusedOptions(CPU, chunk=again.earlier_choice["chunk"]))
    assert not run_together([again], engine, engine.rounds)
    run = experiment.config.digest()
    charges = Ledger(loop.folder.ledger, read_only=True)._rows(CHARGES)
    assert charges == [(number, f"{run}/cuda//") for number in (1, 2, 3, 4)]
