from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engines.one_answer import EVEN, FISSION, LARGER, METHODS, PRIVATE, UNEQUAL, assert_alike, config_of, trainer_of
from engines.test_fused import Branching, with_layer
from fedloom.engines import choice
from fedloom.engines.base import FederationState, Job, SiloState
from fedloom.engines.choice import make_engine
from fedloom.engines.fused_stack import stacks_of
from fedloom.engines.reference import ReferenceEngine
from fedloom.errors import ConfigError, FedloomError, FedloomWarning
from fedloom.experiment import RunLoop, resume, train
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from labelled_vectors import labelled_federation
from support import equal_bits, federation_of

OPEN = ("engine.workers=0", "engine.threads=0")


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("engine.device=cuda",), "engine.device = 'cuda', but no CUDA device can be used here"),
        (("engine.precision=bf16",), "engine.precision = 'bf16' needs a CUDA device"),
        (("engine.name=reference", "engine.precision=tf32"), "engine.precision = 'tf32' needs engine.name = 'fused'"),
        (("engine.name=fast",), "unknown value 'fast'"),
        (("engine.device=tpu",), "unknown value 'tpu'"),
    ],
)
def test_what_cannot_be_had_is_one_sentence_and_leaves_nothing(
    overrides: tuple[str, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FedloomError, match=complaint):
        train(config_of(*overrides), tmp_path / "run", UNEQUAL)
    assert not (tmp_path / "run").exists()


def test_the_reference_engine_knows_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"engine\.device = 'cuda' needs engine\.name = 'fused'"):
        make_engine(trainer_of(config_of("engine.name=reference", "engine.device=cuda"), UNEQUAL)[0])


PRETRAINED = ("privacy.pretraining=1", "sharing.scopes.encoder=silo")
LONG = "rounds=3000"  # 2 to 6 steps a silo and round
WIDE = "model.hidden=[1400]"  # 231,000 parameters, of which batches of 40 are heavy


@pytest.mark.parametrize(
    ("cores", "overrides", "chosen"),
    [
        (2, (*OPEN, LONG), "fused on cpu, float32, 1 stack of up to 10 silos"),
        (3, (*OPEN, LONG), "fused on cpu, float32, 1 stack of up to 10 silos"),
        (4, (*OPEN, LONG), "reference, 1 worker x 1 thread"),  # whose workers would be as fast, were steps heavier
        (2, (*OPEN, "rounds=30"), "reference, 1 worker x 1 thread"),  # too short
        (2, (*OPEN, LONG, "participation.rate=0.2"), "reference, 1 worker x 1 thread"),  # nobody to train beside
        (2, (*OPEN, LONG, "model.network=conv", "model.channels=[3, 4]"), "reference, 1 worker x 1 thread"),
        (2, (*OPEN, LONG, WIDE), "reference, 1 worker x 1 thread"),
        (2, (*OPEN, LONG, WIDE, "local.batch_size=40"), "reference, 2 worker threads"),
        (3, (*OPEN, LONG, WIDE, "local.batch_size=40"), "reference, 3 worker threads"),
        (16, (*OPEN, LONG, WIDE, "local.batch_size=40"), "reference, 4 worker threads"),
        (1, (*OPEN, WIDE, "local.batch_size=40"), "reference, 1 worker x 1 thread"),
        (16, (*OPEN, WIDE, "local.batch_size=40", "engine.threads=3"), "reference, 1 worker x 3 threads"),
        (2, (*OPEN, LONG, "engine.threads=2"), "reference, 1 worker x 2 threads"),
        (2, (*OPEN, LONG, "engine.workers=1"), "reference, 1 worker x 1 thread"),
        (2, (*OPEN, LONG, "engine.name=reference"), "reference, 1 worker x 1 thread"),
        (2, ("engine.name=fused",), "fused on cpu, float32, 1 stack of up to 10 silos"),
        (2, (*OPEN, LONG, *PRIVATE), "fused on cpu, float32, 1 stack of up to 10 silos"),
        (
            2,
            (*OPEN, LONG, *PRIVATE, "privacy.pretraining=1", "sharing.scopes.encoder=silo"),
            "reference, 1 worker x 1 thread",
        ),
    ],
)
def test_on_a_cpu_rules_choose(
    cores: int, overrides: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer, _ = trainer_of(config_of(*overrides), LARGER if PRIVATE[0] in overrides else UNEQUAL)
    engine = make_engine(trainer)
    assert engine.describe() == chosen
    engine.close()
    if "fused" in chosen:  # and just enough work for it
        monkeypatch.setattr(choice, "WORTH_BATCHING", choice._steps(trainer) * 5)
        assert choice._worth_batching(trainer) == ("engine.name=fused" not in overrides)
        monkeypatch.setattr(choice, "WORTH_BATCHING", choice._steps(trainer) * 5 + 1)
        assert not choice._worth_batching(trainer)


@pytest.mark.parametrize("name", ["fused", "auto"])
def test_what_cannot_be_batched_falls_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "WORTH_BATCHING", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    method, federation = with_layer(Branching())
    trainer, _ = trainer_of(config_of(*OPEN, f"engine.name={name}"), federation, method)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = make_engine(trainer)
    assert isinstance(engine, ReferenceEngine)
    said = [str(w.message) for w in caught if issubclass(w.category, FedloomWarning)]
    # Asked for by name, the person is told; "auto" has promised nothing.
    assert [text for text in said if "module 'body.1' (Branching)" in text] == (said if name == "fused" else [])
    assert len(said) == (name == "fused")


def test_a_fused_run_equals_a_reference_run_and_resumes_on_either(tmp_path: Path) -> None:
    overrides = (FISSION, "rounds=3", "sharing.scopes.encoder=silo", "engine.keep_checkpoints=3")
    reference = train(config_of(*overrides, "engine.name=reference"), tmp_path / "reference", UNEQUAL)
    fused = train(config_of(*overrides, "engine.name=fused"), tmp_path / "fused", UNEQUAL)
    assert reference.folder.environment["engine"] == "reference, 1 worker x 1 thread"
    assert fused.folder.environment["engine"].startswith("fused on cpu, float32, 1 stack")
    assert reference.folder.egress() == fused.folder.egress()
    wanted = load_checkpoint(tmp_path / "reference")
    found = load_checkpoint(tmp_path / "fused")
    assert_alike(found.server, wanted.server, {})
    assert_alike(found.silos["a0"], wanted.silos["a0"], {})

    folder = RunFolder.open(tmp_path / "fused")
    for number in (2, 3):
        for path in (tmp_path / "fused" / "checkpoints" / f"round-{number:04d}").iterdir():
            path.unlink()
        (tmp_path / "fused" / "checkpoints" / f"round-{number:04d}").rmdir()
    folder.rewind(1)
    (tmp_path / "fused" / "status.json").unlink(missing_ok=True)
    resumed = resume(tmp_path / "fused", UNEQUAL, engine={"name": "reference"})
    assert resumed.folder.environment["engine_choice"]["name"] == "reference"
    assert_alike(load_checkpoint(tmp_path / "fused").server, wanted.server, {})


@pytest.mark.parametrize(
    ("overrides", "earlier"),
    [
        (
            OPEN,
            {"name": "fused", "device": "cpu", "chunk": 2, "matrix_convolutions": False, "compiled": False, "lanes": 2},
        ),
        (OPEN, {"name": "reference", "device": "cpu", "threads": 3}),
        (("engine.workers=1", "engine.threads=0"), {"name": "reference", "device": "cpu", "threads": 1}),
    ],
)
def test_a_resumed_run_makes_the_same_choices(overrides: tuple[str, ...], earlier: dict[str, object]) -> None:
    engine = make_engine(trainer_of(config_of(*overrides), UNEQUAL)[0], earlier)
    assert engine.choice() == earlier
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("present", "overrides", "device"),
    [
        (True, (), "cuda"),
        (True, ("engine.device=cpu",), "cpu"),
        (True, ("engine.name=reference",), "cpu"),
        (False, (), "cpu"),
    ],
)
def test_a_run_is_measured_where_it_is_trained(
    present: bool, overrides: tuple[str, ...], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    measured: list[str] = []
    monkeypatch.setattr(RunLoop, "run_alone", lambda life, _: measured.append(life.evaluator.device.type))
    train(config_of(*overrides), tmp_path / "run", UNEQUAL)
    resume(tmp_path / "run", UNEQUAL)
    assert measured == [device, device]


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, memory: float = 150e9) -> None:
    """Stacks stay on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
    monkeypatch.setattr(choice, "stacks_of", lambda trainers, _: stacks_of(trainers, torch.device("cpu")))
    monkeypatch.setattr(choice, "FusedEngine", lambda _, options, *__: SimpleNamespace(options=options))


def manner(engine: object) -> str:
    assert isinstance(engine, SimpleNamespace)
    return ("products" if engine.options.matrix_convolutions else "groups") + ", compiled" * engine.options.compiled


VECTORS = labelled_federation()
GAN, SOME = "method.name=fedgan", "participation.rate=0.5"
HEAD = ("method.name=linear_head", "local.optimizer=sgd")


FOLLOWING = (*HEAD, "method.milestones=[0.5]")  # another step after half of the rounds
BRANCHES = "mlp and convolutions"  # a stack of each


@pytest.mark.parametrize(
    ("rounds", "federation", "overrides", "chosen"),
    [
        # 4 steps of 2 phases for 5 silos and 4 more places, or for 2 (of a round of some) and 4; a million are enough.
        pytest.param(13_889, EVEN, (GAN,), "products, compiled", id="all"),
        pytest.param(13_888, EVEN, (GAN,), "groups", id="short"),
        pytest.param(20_834, EVEN, (GAN, SOME), "products, compiled", id="some"),
        pytest.param(20_833, EVEN, (GAN, SOME, "engine.precision=tf32"), "products", id="short, tf32"),
        pytest.param(99_999, UNEQUAL, (GAN, SOME), "groups", id="unequal"),
        pytest.param(99_999, EVEN, (GAN, SOME, *PRIVATE), "groups", id="private"),
        pytest.param(999_999, EVEN, (*METHODS[BRANCHES], SOME), "groups", id="some branches"),
        # 4 steps for 5 silos and 30 more places; fifteen millions are enough.
        pytest.param(107_143, EVEN, (), "products, compiled", id="all, no convolutions"),
        pytest.param(107_142, EVEN, (), "groups", id="short, no convolutions"),
        pytest.param(999_999, EVEN, (SOME,), "groups", id="some, no convolutions"),
        pytest.param(999_999, VECTORS, HEAD, "products, compiled", id="vectors"),
        pytest.param(999_999, VECTORS, FOLLOWING, "groups", id="following the rounds"),
    ],
)
def test_how_a_gpu_takes_a_step(
    rounds: int, federation: Federation, overrides: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled if there is enough to do, and one compilation serves all of it."""
    pretend_gpu(monkeypatch)
    trainer, _ = trainer_of(config_of(*overrides, "rounds=9"), federation)
    config = replace(trainer.config, rounds=rounds)  # only now: who takes part is drawn for every round
    assert manner(make_engine(replace(trainer, config=config))) == chosen


@pytest.mark.parametrize(("runs", "compiled"), [(1, False), (2, True)])
def test_a_pack_is_compiled_if_its_runs_have_enough_to_do_together(
    runs: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 steps a round for 5 or 10 silos, and 4 more places."""
    pretend_gpu(monkeypatch)
    rounds = "rounds=9000"
    members = [trainer_of(config_of(GAN, "engine.name=fused", rounds, f"seed={n}"), EVEN)[0] for n in range(runs)]
    assert choice.make_pack(members).options.compiled == compiled


@pytest.mark.parametrize(("copies", "chunk"), [(0.5, 1), (8.0, 8), (8.9, 8), (1000.0, 128)])
def test_as_many_silos_train_at_once_as_half_of_the_memory_holds(
    copies: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trainer_of(config_of(), EVEN)
    (model,) = choice._models(trainer)
    weights = 4 * sum(tensor.numel() for tensor in model.state_dict().values())
    pretend_gpu(monkeypatch, memory=2 * 8 * weights * copies)
    engine = make_engine(trainer)
    assert isinstance(engine, SimpleNamespace)
    assert engine.options.chunk == chunk


THREE = federation_of([0] * 33, [1] * 7, [0, 1] * 10)


def test_worker_threads_give_the_bits_of_the_plain_loop() -> None:
    """Private encoders, which draw fresh weights in the first round, and kept moments, over two rounds."""
    config = config_of("sharing.scopes.encoder=silo", "local.keep_optimizer=true")
    trainer, start = trainer_of(config, THREE)

    def after_two_rounds(engine: ReferenceEngine) -> FederationState:
        state = start
        for number in (1, 2):
            state, _ = engine.round(Job(state, RoundContext(number, 2, (0, 1, 2)), lambda _: None))
        engine.close()
        return state

    plain = after_two_rounds(ReferenceEngine(trainer))
    spread = after_two_rounds(ReferenceEngine(trainer, workers=2, kind="thread"))
    assert all(equal_bits(plain.server.blocks[key], spread.server.blocks[key]) for key in plain.server.blocks)
    nothing = SiloState()
    assert all(equal_bits(plain.silos[i].tensors, spread.silos.get(i, nothing).tensors) for i in (0, 1, 2))


def test_an_engine_sets_its_threads_again_when_another_was_tried() -> None:
    trainer, state = trainer_of(config_of(), THREE)
    engine = ReferenceEngine(trainer, threads=2)
    ReferenceEngine(trainer, threads=1)
    try:
        next(iter(engine.train(engine.tasks(state, RoundContext(1, 1, (1,))))))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
