"""One answer: whatever the method, the fused engine learns what the reference engine learns, up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engines.one_answer import (
    EVEN,
    FISSION,
    LARGER,
    METHODS,
    MIXED,
    PRIVATE,
    ROUNDS,
    UNEQUAL,
    Placed,
    Played,
    assert_alike,
    assert_one_answer,
    config_of,
    image_federation,
    lived_together,
    rounds_of,
    trainer_of,
)
from fedloom.engines import fused, fused_lanes, fused_stack
from fedloom.engines.base import FederationState
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_program import StackProgram
from fedloom.engines.fused_records import ChunkTable, WholeTable
from fedloom.engines.fused_runner import GraphRunner, Recorder
from fedloom.engines.fused_stack import Stack
from fedloom.engines.fused_step import WatchedContext
from fedloom.engines.fused_support import UnsupportedError
from fedloom.engines.reference import ReferenceEngine
from fedloom.errors import FedloomError, FedloomWarning
from fedloom.federation.records import Federation
from fedloom.methods.base import Method
from fedloom.methods.steps import ServerRound, ServerState, ServerStep, Stepped
from fedloom.objectives.base import Losses, Step
from fedloom.sharing.aggregation import Aggregator
from fedloom.sharing.update import DivergedError

CPU = torch.device("cpu")
IN_CHUNKS = FusedOptions(CPU, chunk=3)


@pytest.mark.parametrize("overrides", METHODS.values(), ids=METHODS.keys())
def test_fused_equals_reference(overrides: tuple[str, ...]) -> None:
    assert_one_answer(*trainer_of(config_of(*overrides), UNEQUAL), ROUNDS, IN_CHUNKS)


@pytest.mark.parametrize(
    "name", ["+D", "+H+L+D", "fedgan", "group_vaes", "flow_vae with a refiner", "fission_flow of codes"]
)
def test_silos_of_several_groups(name: str) -> None:
    """Branches of several groups in one silo, beside silos of one group: two stacks."""
    trainer, start = trainer_of(config_of(*METHODS[name], "sharing.weights=equal-groups"), MIXED)
    assert_one_answer(trainer, start, ROUNDS, IN_CHUNKS)


@pytest.mark.parametrize("updates", ["paper", "matched"])
def test_the_centralised_layout(updates: str) -> None:
    overrides = ("data.layout=centralised", f"local.updates={updates}", "participation.rate=0.4")
    trainer, start = trainer_of(config_of(FISSION, *overrides), UNEQUAL)
    assert_one_answer(trainer, start, ((0,), (0,)), IN_CHUNKS)


@pytest.mark.parametrize(
    "options",
    [FusedOptions(CPU, chunk=1), FusedOptions(CPU, chunk=5), FusedOptions(CPU, matrix_convolutions=False)],
    ids=["one by one", "all at once", "grouped convolutions"],
)
def test_chunks_and_convolutions_do_not_matter(options: FusedOptions) -> None:
    assert_one_answer(*trainer_of(config_of(*METHODS["fedgan"]), UNEQUAL), ROUNDS, options)


def test_windows_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fused.WINDOW_NUMBERS, "cpu", 1)  # batches and noise drawn step by step
    assert_one_answer(*trainer_of(config_of(*METHODS["fedgan"]), UNEQUAL), ROUNDS, IN_CHUNKS)


@pytest.mark.parametrize("name", ["+D", "private encoder, kept moments", "fedgan", "sgd"])
def test_what_is_compiled_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that are handed to the compiler, left as they are: compiling takes a minute on a CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    options = replace(IN_CHUNKS, compiled=True)
    assert_one_answer(*trainer_of(config_of(*METHODS[name]), UNEQUAL), ROUNDS, options)


@pytest.mark.parametrize(
    "name",
    [
        "+D",
        "private encoder, kept moments",
        "fedgan",
        "fedgan with batch norm",
        "moon",
        "fission_flow",
        "fission_flow of codes",
        "encoder on samples",
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_silos_in_lanes_compute_the_same(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    options = replace(IN_CHUNKS, lanes=2, compiled=compiled)
    assert_one_answer(*trainer_of(config_of(*METHODS[name]), UNEQUAL), ROUNDS, options)


def test_mixed_silos_go_through_lanes() -> None:
    assert_one_answer(*trainer_of(config_of(*METHODS["fission_flow"]), MIXED), ROUNDS, replace(IN_CHUNKS, lanes=3))


def test_weights_that_are_rounded_at_once_are_those_that_autocast_would_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def learned() -> FederationState:
        trainer, start = trainer_of(config_of(*METHODS["fission_flow"]), EVEN)
        engine = FusedEngine(trainer, replace(IN_CHUNKS, precision="bf16", lanes=2))
        return lived_together(engine, [start], [((0, 1, 2),)])[0][0]

    at_once = learned()
    monkeypatch.setattr(fused_lanes, "_in_products", lambda model: set())
    one_by_one = learned()
    for block, tensors in one_by_one.server.blocks.items():
        for name, tensor in tensors.items():
            assert torch.equal(at_once.server.blocks[block][name], tensor), name


def test_dp_sgd_does_not_train_in_lanes() -> None:
    trainer, _ = trainer_of(config_of(*PRIVATE), LARGER)
    with pytest.raises(UnsupportedError, match="lanes"):
        FusedEngine(trainer, replace(IN_CHUNKS, lanes=2))


class Tape:
    """Stands in for a recorder of CUDA graphs; after ``good`` recordings it fails as the driver would."""

    def __init__(self, good: int) -> None:
        self.left = good

    def __call__(self, warm_up: Callable[[], None], step: Callable[[], None], beside: object) -> Played:
        warm_up()
        if not self.left:
            raise RuntimeError("operation not permitted when stream is capturing\nmore than anybody wants to know")
        self.left -= 1
        return Played(step)


def recorded_by(tape: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FusedEngine, "_runner", lambda engine, program, stack: GraphRunner(program, "float32", 20, tape)
    )


@pytest.mark.parametrize("name", ["+D", "private encoder, kept moments", "fedgan"])
def test_steps_that_are_recorded_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape(100)
    recorded_by(tape, monkeypatch)
    assert_one_answer(*trainer_of(config_of(*METHODS[name]), UNEQUAL), ROUNDS, IN_CHUNKS)
    assert tape.left < 100


def test_a_step_is_recorded_anew_when_another_stage_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recorded trains the phases of its round, whichever phases train now."""

    @dataclass(frozen=True)
    class Staged:
        program: StackProgram
        training: tuple[int, ...]
        step: Callable[[], None]

        def replay(self) -> None:
            now, self.program.training = self.program.training, self.training
            self.step()
            self.program.training = now

    recorded = []

    def runner(engine: FusedEngine, program: StackProgram, stack: Stack) -> GraphRunner:
        def record(warm_up: Callable[[], None], step: Callable[[], None], beside: object) -> Staged:
            recorded.append(program.training)
            return Staged(program, program.training, step)

        return GraphRunner(program, "float32", 20, record)

    monkeypatch.setattr(FusedEngine, "_runner", runner)
    trainer, start = trainer_of(config_of(*METHODS["fission_flow of codes"]), UNEQUAL)
    assert_one_answer(trainer, start, ROUNDS, IN_CHUNKS)
    assert set(recorded) == {(0,), (1,)}
    assert recorded == sorted(recorded)


@pytest.mark.parametrize("good", [0, 2], ids=["at once", "later"])
def test_a_recording_that_fails_does_not_end_the_run(good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_by(Tape(good), monkeypatch)
    with pytest.warns(FedloomWarning) as caught:
        assert_one_answer(*trainer_of(config_of(FISSION), UNEQUAL), ROUNDS, IN_CHUNKS)
    assert [str(warning.message) for warning in caught] == [
        "a step could not be recorded (operation not permitted when stream is capturing): "
        "going on with steps one by one, which is slower"
    ]


@pytest.mark.parametrize(("chunk", "left"), [(3, 1), (128, 2)], ids=["of three", "of all five"])
def test_a_recording_without_memory_halves_the_chunk(chunk: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tape, full = Tape(100), iter([torch.OutOfMemoryError("no room")])

    def record(warm_up: Callable[[], None], step: Callable[[], None], beside: object) -> Played:
        for error in full:
            raise error
        return tape(warm_up, step, beside)

    recorded_by(record, monkeypatch)
    with pytest.warns(FedloomWarning) as caught:
        assert_one_answer(*trainer_of(config_of(FISSION), UNEQUAL), ROUNDS, FusedOptions(CPU, chunk=chunk))
    told = [str(warning.message) for warning in caught]
    assert told == [f"out of device memory: going on with {left} silos at once"]
    assert tape.left < 100  # and goes on with recordings


@pytest.mark.parametrize(
    ("name", "chunk", "rows"),
    [("+D", 3, 54), ("branches of two architectures", 3, 38), ("+D, then distilled", 1, 21), ("moon", 5, 60)],
)
def test_records_that_do_not_fit_are_sent_chunk_by_chunk(
    name: str, chunk: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for those of the largest so many silos of a stack, of which the first holds 21, 17, 16, 5 and 1 records."""
    monkeypatch.setattr(fused_stack, "room_on", lambda device: 0.0)
    options = FusedOptions(CPU, chunk=chunk)
    trainer, start = trainer_of(config_of(*METHODS[name]), UNEQUAL)
    assert_one_answer(trainer, start, ROUNDS, options)
    engine = FusedEngine(trainer, options)
    assert "records sent to the device as silos take part" in engine.describe()
    rounds_of(engine, start, ROUNDS)
    assert len(engine._stacks[0].table.records) == rows


def test_records_are_sent_again_when_their_place_has_moved() -> None:
    small, large = UNEQUAL.silos[0], UNEQUAL.silos[1]
    table = ChunkTable([small, large], CPU)
    for silos in (2, 1):
        table.reserve(silos)
        (offset,) = table.load([small])
        assert torch.equal(table.records.x[offset : offset + len(small)], small.train.x)


def test_an_engine_that_halves_its_chunk_reads_records_where_they_lie_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recorded reads them in their old place."""

    def runner(engine: FusedEngine, program: StackProgram, stack: Stack) -> GraphRunner:
        def record(warm_up: Callable[[], None], step: Callable[[], None], beside: object) -> Placed:
            return Placed(step, stack.table, stack.table.records)

        return GraphRunner(program, "float32", 20, record)

    monkeypatch.setattr(FusedEngine, "_runner", runner)
    monkeypatch.setattr(fused_stack, "room_on", lambda device: 0.0)
    trainer, start = trainer_of(config_of(FISSION), UNEQUAL)
    everybody = (0, 1, 2, 3, 4)
    wanted, _, _ = rounds_of(ReferenceEngine(trainer), start, (everybody, everybody))
    engine = FusedEngine(trainer, IN_CHUNKS)
    halfway, _, _ = rounds_of(engine, start, (everybody,))
    with pytest.warns(FedloomWarning, match="with 1 silos at once"):
        engine._halve(0, torch.OutOfMemoryError())
    ours, _, _ = rounds_of(engine, halfway, (everybody,))
    for key, tensors in wanted.server.blocks.items():
        assert_alike(ours.server.blocks[key], tensors, start.server.blocks[key])


@pytest.mark.parametrize(("room", "stays"), [(5280, True), (5279, False)])
def test_records_stay_on_the_device_where_they_fit(room: float, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 records of 72 bytes, and of 8 for the class and 8 for the group, in two stacks."""
    monkeypatch.setattr(fused_stack, "room_on", lambda device: room)
    trainer, _ = trainer_of(config_of(*METHODS["branches of two architectures"]), UNEQUAL)
    engine = FusedEngine(trainer, IN_CHUNKS)
    assert [isinstance(stack.table, WholeTable) for stack in engine._stacks] == [stays, stays]


def test_a_private_state_passes_from_engine_to_engine() -> None:
    trainer, start = trainer_of(config_of(*METHODS["private encoder, kept moments"]), UNEQUAL)
    first, second = ((0, 1, 2), (1, 2, 3))
    halfway, _, _ = rounds_of(FusedEngine(trainer, IN_CHUNKS), start, (first,))
    mixed, _, _ = rounds_of(ReferenceEngine(trainer), halfway, (second,))
    wanted, _, _ = rounds_of(ReferenceEngine(trainer), start, (first, second))
    for silo in wanted.silos:
        assert_alike(mixed.silos[silo].tensors, wanted.silos[silo].tensors, {})


@settings(max_examples=12)
@given(data=st.data())
def test_any_small_federation(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.tuples(st.sampled_from("abm"), st.integers(1, 20)), min_size=1, max_size=5))
    federation = image_federation({f"{group}{i}": size for i, (group, size) in enumerate(sizes)}, (1, 4, 5))
    silos = st.lists(st.sampled_from(range(len(sizes))), unique=True).map(lambda chosen: tuple(sorted(chosen)))
    rounds = tuple(data.draw(st.lists(silos, min_size=1, max_size=2)))
    config = config_of(
        f"seed={data.draw(st.integers(0, 99))}",
        f"local.batch_size={data.draw(st.integers(1, 9))}",
        f"local.epochs={data.draw(st.integers(1, 2))}",
        f"local.keep_optimizer={data.draw(st.sampled_from(['true', 'false']))}",
        f"sharing.weights={data.draw(st.sampled_from(['size', 'equal-groups']))}",
        f"method.name={data.draw(st.sampled_from(['fedvae', 'fissionvae', 'conditional', 'group_vaes']))}",
        f"sharing.scopes.{data.draw(st.sampled_from(['encoder', 'decoder']))}"
        f"={data.draw(st.sampled_from(['global', 'group', 'silo', 'upload']))}",
        "model.hidden=[6]",
    )
    assert_one_answer(*trainer_of(config, federation), rounds, FusedOptions(CPU, chunk=data.draw(st.integers(1, 4))))


@dataclass(frozen=True)
class Halves(ServerStep):
    """A server step of another kind: half the mean of the updates, which it takes itself or is given."""

    method: Method
    itself: bool

    @property
    def needs_each(self) -> bool:
        return self.itself

    def __call__(self, round: ServerRound) -> Stepped:
        assert any(update.blocks for update in round.updates) is self.itself
        own = Aggregator().merged(round.updates, self.method.plan, {})
        means = own if self.itself else round.merged
        halves = {key: {name: tensor / 2 for name, tensor in part.items()} for key, part in means.items()}
        return Stepped(ServerState({**round.state.blocks, **halves}))


@pytest.mark.parametrize("needs_each", [False, True])
def test_a_server_step_sees_what_it_needs(needs_each: bool) -> None:
    trainer, start = trainer_of(config_of(FISSION), UNEQUAL)
    halves = Halves(trainer.method, needs_each)
    assert_one_answer(replace(trainer, method=replace(trainer.method, server_step=halves)), start, ROUNDS, IN_CHUNKS)


@dataclass(frozen=True)
class Objective:
    """The mean of a network's outputs, weighted by the round's number, pulled towards what was received."""

    noise: Mapping[str, tuple[int, ...]]

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        pull = sum((p - step.received[name]).square().sum() for name, p in model.named_parameters())
        values = step.context.round * model(step.batch.x.flatten(1)).square().sum(dim=1) + pull
        return Losses(values, {"pull": pull.expand(len(values))})


class Net(nn.Module):
    """One block, ``body``, of whatever layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 4), layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Centring(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


def with_layer(layer: nn.Module) -> tuple[Method, Federation]:
    """A method of one block around a layer."""
    federation = image_federation({"a0": 5, "b0": 11, "a1": 8}, (1, 4, 5))
    base = trainer_of(config_of(), federation)[0].method
    plan = replace(base.plan, blocks={"body": base.plan.blocks["encoder"]})
    phase = replace(base.phases[0], trains=("body",), objective=Objective({}))
    return replace(base, plan=plan, build=lambda _: Net(layer), phases=(phase,)), federation


def test_objectives_may_use_the_round_and_what_was_received() -> None:
    method, federation = with_layer(nn.Tanh())
    assert_one_answer(*trainer_of(config_of(), federation, method), ((0, 1), (0, 1, 2)), IN_CHUNKS)


@dataclass(frozen=True)
class Held:
    """A step that, like a CUDA graph, holds on to the round in which it was recorded."""

    step: Callable[[], None]
    program: StackProgram
    context: WatchedContext

    def replay(self) -> None:
        now, self.program._context = self.program._context, self.context
        self.step()
        self.program._context = now


def test_a_recording_follows_the_round_if_its_objective_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def runner(engine: FusedEngine, program: StackProgram, stack: Stack) -> GraphRunner:
        def record(warm_up: Callable[[], None], step: Callable[[], None], beside: object) -> Held:
            return Held(step, program, program._context)

        return GraphRunner(program, "float32", 20, record)

    monkeypatch.setattr(FusedEngine, "_runner", runner)
    method, federation = with_layer(nn.Tanh())
    assert_one_answer(*trainer_of(config_of(), federation, method), ((0, 1), (0, 1), (0, 1, 2)), IN_CHUNKS)


class Scaled(nn.Module):
    """Learns a number, and holds a whole one, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def test_models_may_hold_single_numbers() -> None:
    method, federation = with_layer(Scaled())
    assert_one_answer(*trainer_of(config_of(), federation, method), ((0, 1), (0, 1, 2)), IN_CHUNKS)


@pytest.mark.parametrize(
    ("layer", "complaint"),
    [
        (Branching(), r"module 'body.1' \(Branching\) cannot be batched over silos: vmap: .*data-dependent control"),
        (nn.BatchNorm1d(4), r"module 'body.1' \(BatchNorm1d\) changes its buffer 'running_mean' in place"),
        (nn.Dropout(), r"module 'body.1' \(Dropout\) cannot be batched over silos: vmap: .*random"),
        (Centring(), "in phase 'vae' the loss of one example depends on others in its batch, even on padding"),
    ],
)
def test_what_cannot_be_batched_is_named(layer: nn.Module, complaint: str) -> None:
    method, federation = with_layer(layer)
    with pytest.raises(UnsupportedError, match=complaint):
        FusedEngine(trainer_of(config_of(), federation, method)[0], IN_CHUNKS)


def test_a_diverged_silo_is_named_as_by_the_reference_engine() -> None:
    trainer, start = trainer_of(config_of("local.optimizer=sgd", "local.learning_rate=1e30"), UNEQUAL)
    messages = []
    for engine in (ReferenceEngine(trainer), FusedEngine(trainer, IN_CHUNKS)):
        with pytest.raises(DivergedError, match="silo 'a2' sent values that are not finite") as caught:
            rounds_of(engine, start, ((4,),))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_running_out_of_memory_halves_the_chunk_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two silos, five are tried at once, then two; below one there is nothing left to try."""
    trainer, start = trainer_of(config_of(FISSION), UNEQUAL)
    wanted, _, _ = rounds_of(ReferenceEngine(trainer), start, ((0, 1, 2, 3, 4),))
    make, room = fused.StackProgram, 2

    def cramped(*arguments: object) -> object:
        if arguments[1] > room:
            raise torch.OutOfMemoryError
        return make(*arguments)

    monkeypatch.setattr(fused, "StackProgram", cramped)
    engine = FusedEngine(trainer, FusedOptions(CPU, chunk=5))
    with pytest.warns(FedloomWarning, match="out of device memory: going on with 2 silos at once"):
        ours, _, _ = rounds_of(engine, start, ((0, 1, 2, 3, 4),))
    for key, tensors in wanted.server.blocks.items():
        assert_alike(ours.server.blocks[key], tensors, start.server.blocks[key])
    room = 0
    with (
        pytest.warns(FedloomWarning, match="with 1 silos at once"),
        pytest.raises(FedloomError, match="a single silo's training does not fit"),
    ):
        rounds_of(FusedEngine(trainer, IN_CHUNKS), start, ((0, 1),))


def test_a_stack_that_does_not_fit_beside_another_has_the_memory_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, start = trainer_of(config_of(*METHODS["branches of two architectures"]), UNEQUAL)
    everybody = (0, 1, 2, 3, 4)
    wanted, _, _ = rounds_of(ReferenceEngine(trainer), start, (everybody, everybody))
    make, engine = fused.StackProgram, FusedEngine(trainer, FusedOptions(CPU))

    def cramped(*arguments: object) -> object:
        if engine._programs:
            raise torch.OutOfMemoryError
        return make(*arguments)

    monkeypatch.setattr(fused, "StackProgram", cramped)
    assert sorted(len(stack.members) for stack in engine._stacks) == [2, 3]
    with pytest.warns(FedloomWarning, match="out of device memory: going on with 1 silos at once"):
        ours, _, _ = rounds_of(engine, start, (everybody, everybody))
    for key, tensors in wanted.server.blocks.items():
        assert_alike(ours.server.blocks[key], tensors, start.server.blocks[key])


def test_a_small_stack_that_does_not_fit_leaves_half_of_the_places_to_a_large_one() -> None:
    sizes = {f"a{number}": 8 for number in range(8)} | {"b0": 8}
    overrides = METHODS["branches of two architectures"]
    engine = FusedEngine(trainer_of(config_of(*overrides), image_federation(sizes))[0], FusedOptions(CPU))
    small = next(number for number, stack in enumerate(engine._stacks) if len(stack.members) == 1)
    with pytest.warns(FedloomWarning, match="going on with 4 silos at once"):
        engine._halve(small, torch.OutOfMemoryError())
