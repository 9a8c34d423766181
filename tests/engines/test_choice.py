from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from engines.one_answer import EVEN, FISSION, METHODS, PRIVATE, UNEQUAL, assert_alike, config_of, trainer_of
from engines.test_fused import Branching, with_layer
from fedloom.engines import choice
from fedloom.engines.base import FederationState, Result
from fedloom.engines.choice import make_engine
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, FedloomError, FedloomWarning
from fedloom.experiment import Life, resume, train
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from labelled_vectors import labelled_federation

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
        make_engine(*trainer_of(config_of("engine.name=reference", "engine.device=cuda"), UNEQUAL))


@pytest.mark.parametrize(
    ("fused_seconds", "worth", "share", "kind"),
    [
        (1e-9, 0.0, 8.5, FusedEngine),
        (1e9, 0.0, 8.5, ReferenceEngine),
        (1e-9, 1e9, 8.5, ReferenceEngine),
        (1e-9, 0.0, 7.5, ReferenceEngine),
    ],
    ids=["faster", "slower", "short", "few steps"],
)
def test_auto_takes_the_faster_one_where_measuring_pays(
    fused_seconds: float, worth: float, share: float, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials of 1, 2 and 5 silos at once, 29 steps each, are 7.73 times the 30 silo-steps of the run."""
    monkeypatch.setattr(choice, "TRIAL_SHARE", share)
    monkeypatch.setattr(choice, "WORTH_TRYING_FUSED", worth)
    monkeypatch.setattr(choice, "_fused_seconds", lambda *_: fused_seconds)
    assert isinstance(make_engine(*trainer_of(config_of(*OPEN), UNEQUAL)), kind)
    # Who sets workers or threads has the reference engine in mind.
    assert isinstance(make_engine(*trainer_of(config_of(), UNEQUAL)), ReferenceEngine)


def test_the_fastest_chunk_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_fused_seconds", lambda engine, *_: {1: 3.0, 2: 1.0, 5: 2.0}[engine.chunk])
    engine = make_engine(*trainer_of(config_of("engine.name=fused"), UNEQUAL))
    assert isinstance(engine, FusedEngine)
    assert engine.describe() == "fused on cpu, float32, 1 stack of up to 2 silos"


@pytest.mark.parametrize("name", ["fused", "auto"])
def test_what_cannot_be_batched_falls_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "WORTH_TRYING_FUSED", 0.0)
    monkeypatch.setattr(choice, "TRIAL_SHARE", float("inf"))
    method, federation = with_layer(Branching())
    trainer, state = trainer_of(config_of(*OPEN, f"engine.name={name}"), federation, method)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = make_engine(trainer, state)
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


def test_a_resumed_run_makes_the_same_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_fused_seconds", lambda *_: pytest.fail("measured again"))
    earlier = {"name": "fused", "device": "cpu", "chunk": 2, "matrix_convolutions": False, "compiled": False}
    engine = make_engine(*trainer_of(config_of(*OPEN), UNEQUAL), earlier)
    assert engine.choice() == earlier
    earlier = {"name": "reference", "device": "cpu", "threads": 1}
    assert (
        make_engine(*trainer_of(config_of("engine.workers=1", "engine.threads=0"), UNEQUAL), earlier).choice()
        == earlier
    )


def test_measured_times_are_those_of_steps() -> None:
    trainer, state = trainer_of(config_of(*OPEN), UNEQUAL)
    engine, seconds = choice.fastest_fused(trainer, state, torch.device("cpu"))
    assert engine.chunk in (1, 2, 5)
    assert 0 < seconds < 1


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
    monkeypatch.setattr(Life, "alone", lambda life, _: measured.append(life.evaluator.device.type))
    train(config_of(*overrides), tmp_path / "run", UNEQUAL)
    resume(tmp_path / "run", UNEQUAL)
    assert measured == [device, device]


class Batching:
    """Stands in for an engine on a GPU, and takes the time that it is told."""

    def __init__(
        self, trainer: Trainer, options: FusedOptions, stacks: object = None, packed: Sequence[Trainer] = ()
    ) -> None:
        real = FusedEngine(trainer, FusedOptions(torch.device("cpu")))
        self.options, self.convolutions, self.convolutional = options, real.convolutions, real.convolutional
        self.follows_rounds = real.follows_rounds

    @property
    def manner(self) -> str:
        return ("products" if self.options.matrix_convolutions else "groups") + ", compiled" * self.options.compiled


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
    """Every run has 25 silo-steps left, which take so many seconds each."""
    monkeypatch.setattr(choice, "FusedEngine", Batching)
    monkeypatch.setattr(choice, "stacks_of", lambda *_: [])
    monkeypatch.setattr(choice, "steps_left", lambda *_: 25.0)
    monkeypatch.setattr(choice, "_fused_seconds", lambda engine, *_: seconds[engine.manner])


VECTORS = labelled_federation()
GAN, SOME = "method.name=fedgan", "participation.rate=0.5"
HEAD = ("method.name=linear_head", "local.optimizer=sgd")


FOLLOWING = (*HEAD, "method.milestones=[0.5]")  # another step after half of the rounds
BRANCHES = "mlp and convolutions"  # a stack of each


@pytest.mark.parametrize(
    ("seconds", "federation", "overrides", "chosen"),
    [
        pytest.param({"groups": 20, "products": 10}, EVEN, (GAN,), "products, compiled", id="all"),
        pytest.param({"groups": 10, "products": 20}, EVEN, (GAN, SOME), "products, compiled", id="some"),
        pytest.param({"groups": 10, "products": 20}, UNEQUAL, (GAN, SOME), "groups", id="unequal"),
        pytest.param({"groups": 10, "products": 20}, EVEN, (GAN, SOME, *PRIVATE), "groups", id="private"),
        pytest.param({"groups": 9.5, "products": 20}, EVEN, (GAN,), "groups", id="short"),
        pytest.param({"groups": 10, "products": 20}, EVEN, (*METHODS[BRANCHES], SOME), "groups", id="some branches"),
        pytest.param({"groups": 10}, EVEN, (SOME,), "groups", id="some, no convolutions"),
        pytest.param({"groups": 10}, EVEN, (), "products, compiled", id="all, no convolutions"),
        pytest.param({"groups": 10}, VECTORS, HEAD, "products, compiled", id="vectors"),
        pytest.param({"groups": 10}, VECTORS, FOLLOWING, "groups", id="following the rounds"),
    ],
)
def test_how_a_gpu_takes_a_step(
    seconds: dict[str, float],
    federation: Federation,
    overrides: tuple[str, ...],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever was fastest; compiled if more than four minutes are left and one compilation does."""
    pretend_gpu(monkeypatch, seconds)
    trainer, state = trainer_of(config_of(*overrides), federation)
    engine, _ = choice.fastest_fused(trainer, state, torch.device("cuda"))
    assert isinstance(engine, Batching)
    assert engine.manner == chosen


@pytest.mark.parametrize(("runs", "compiled"), [(1, False), (2, False), (3, True)])
def test_a_pack_is_compiled_if_its_runs_take_long_together(
    runs: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25 steps of four seconds are 100 seconds a run; from four minutes on it is worth it."""
    pretend_gpu(monkeypatch, {"groups": 4, "products": 5})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    members = [trainer_of(config_of(GAN, SOME, "engine.name=fused", f"seed={seed}"), EVEN) for seed in range(runs)]
    engine = choice.make_pack([trainer for trainer, _ in members], [state for _, state in members])
    assert engine.options.compiled == compiled


@pytest.mark.parametrize(("device", "steps"), [("cpu", 13), ("cuda", 49)])
def test_trials_on_a_gpu_are_longer(device: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round there costs beside its steps varies so much that twelve of them would drown in it."""
    trainer, state = trainer_of(config_of(GAN, SOME), EVEN)
    limits: list[int | None] = []

    def noted(_: FusedEngine, __: FederationState, ___: RoundContext, step_limit: int | None = None) -> list[Result]:
        limits.append(step_limit)
        return cast(list[Result], [SimpleNamespace(steps=step_limit)])

    monkeypatch.setattr(FusedEngine, "train", noted)
    engine = FusedEngine(trainer, FusedOptions(torch.device("cpu")))
    monkeypatch.setattr(engine, "options", FusedOptions(torch.device(device)))
    monkeypatch.setattr(engine, "close", lambda: None)
    choice._fused_seconds(engine, trainer, state)
    assert limits == [1, 1, 1, steps, steps]
