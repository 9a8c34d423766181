"""Whoever sets weights learns nothing from how a silo answers: with and without a record, answers have one form."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedloom.config import Config
from fedloom.engines.base import initial_state, received_by, site_of
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.pace import Pacemaker
from fedloom.engines.remote.round_store import RoundStore
from fedloom.engines.remote.silo import Grant, SiloService
from fedloom.engines.remote.work import Order
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment
from fedloom.federation.records import Federation, Records, Silo
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import METHODS
from fedloom.privacy.clipping import Lengths, Quantile
from fedloom.privacy.ledger import read_accounts
from fedloom.runs.folder import RunFolder
from fedloom.sharing.codec import packed, unpacked
from local_grid import remote
from support import NARROW, tiny_config

UNITS = 8  # and batches of as many: everybody is drawn in every step
SHAPES = {False: (1, 6, 6), True: (5,)}  # of images, and of vectors
GRANT = Grant(float("inf"), repeatable=True)
Craft = Callable[[str, Tensor], Tensor]


def records(shape: tuple[int, ...], count: int = UNITS) -> Records:
    x = torch.rand(count, *shape, generator=torch.Generator().manual_seed(7))
    return Records(0.8 * x, torch.arange(count) % 3, torch.zeros(count, dtype=torch.int64), torch.arange(count) // 2)


def with_record(plain: Records, value: float, label: int) -> Records:
    """A neighbour: one record is another one."""
    x, y = plain.x.clone(), plain.y.clone()
    x[3], y[3] = value, label
    return replace(plain, x=x, y=y)


def federation(own: Records) -> Federation:
    other = replace(own, group=torch.ones_like(own.group))
    return Federation("two", (Silo("here", own), Silo("there", other)), own, ("a", "b"), ("ant", "bee", "cat"))


def config_for(method: str, *overrides: str) -> Config:
    return tiny_config(
        f"method.name={method}",
        "engine.name=reference",
        "rounds=3",
        "model.hidden=[5]",
        "model.channels=[2]",
        "model.latent=2",
        f"local.batch_size={UNITS}",
        "local.steps=2",
        "local.keep_optimizer=true",
        "privacy.mechanism=dp-sgd",
        "privacy.noise_multiplier=1.0",
        *overrides,
    )


def task(config: Config, everybody: Federation, craft: Craft, round: int = 1, run: str = "run") -> Frame:
    """What a server sends whose blocks are its own choice."""
    method, site = Experiment.of(config, remote(everybody)).method, site_of(everybody, 0)
    coming = method.plan.split(received_by(method.plan, initial_state(method, everybody, config).server, site), site)
    crafted = {key: {name: craft(name, tensor) for name, tensor in part.items()} for key, part in coming.items()}
    blocks = {key: packed(part) for key, part in crafted.items() if part}
    return Order(run, config, RoundContext(round, config.rounds, (0, 1)), settled=0).frame(blocks)


class World(SiloService):
    """A silo in a world of its own, in which nobody has met its records before."""

    def answer(self, frame: Frame) -> Frame:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FEDLOOM_REGISTRY", str(self._home / "registry"))
            return super().answer(frame)


def service(path: Path, everybody: Federation, grant: Grant = GRANT, **options: Any) -> SiloService:
    path.mkdir(parents=True, exist_ok=True)

    def agreed(config: Config, *_: Any) -> Grant:
        return replace(grant, unit=config.privacy.unit)

    return World(path, remote(everybody, 0), 0, lambda _: None, agreed, **options)


def form(answer: Frame) -> tuple[Any, ...]:
    """All of an answer that noise does not cover; what is not finite in it must not tell records apart either."""
    parts = {
        name: {key: (t.dtype, t.shape, bool(torch.isfinite(t).all())) for key, t in unpacked(part, name).items()}
        for name, part in answer.parts.items()
    }
    return dict(answer.header), parts, len(answer.to_bytes())


def all_finite(answer: Frame) -> bool:
    parts = (unpacked(part, name) for name, part in answer.parts.items())
    return all(bool(torch.isfinite(tensor).all()) for part in parts for tensor in part.values())


def one_number(value: float) -> Craft:
    def craft(_: str, tensor: Tensor) -> Tensor:
        found = tensor.clone()
        found.view(-1)[0] = value
        return found

    return craft


def detecting(name: str, tensor: Tensor) -> Tensor:
    """The first layer gives 0 for all but the brightest images; what it gives for these is too much for the next."""
    return torch.full_like(tensor, -25e3 if name.endswith("bias") else 1e3)


CRAFTS: dict[str, Craft] = {
    "as they are": lambda _, t: t,
    **{f"times {scale:g}": lambda _, t, scale=scale: scale * t for scale in (1e-30, 1e-19, 1e6)},  # type: ignore[misc]
    "zeros": lambda _, t: torch.zeros_like(t),
    "biases": lambda name, t: torch.full_like(t, 9e8) if name.endswith("bias") else t,
    "detecting": detecting,
    "not a number": one_number(torch.nan),
}
# Images are bytes or lie in [0, 1]; vectors are any finite numbers, and records without a class make some methods fail.
EXTREMES = {False: [(1.0, 0)], True: [(1e30, 0), (0.5, -1)]}
SMALL = {
    **NARROW,
    "dp_cgan": ("method.generator_hidden=[5]", "method.discriminator_hidden=[5]"),
    "flow_vae": ("method.flow=[5]",),
}
# Counts of tables depend on no weights.
CASES = [(name, SMALL.get(name, ())) for name in sorted(METHODS) if METHODS[name].modalities != ("table",)] + [
    ("align_fl", ("server.latents=histogram", "server.components=3", "privacy.pretraining=1")),
    ("fedvae", ("privacy.unit=subject", "local.batch_size=4", "privacy.clipping=quantile")),
    ("fissionvae", ("method.hierarchy=true", "model.top_hidden=[4]", "model.top_latent=2")),
    ("fissionvae", ("sharing.scopes={encoder='silo'}", "model.lipschitz=2.0")),
    ("fedvae", ("model.penalty=jacobian",)),
    ("fedvae", ("model.posterior=closed-form", "model.hidden=[]", "model.likelihood=gaussian")),
    ("dp_cvae", ("model.posterior=closed-form", "model.hidden=[]")),
    ("dp_cvae", ("privacy.unit=subject", "local.batch_size=4", "sharing.scopes={encoder='global'}")),
    ("dp_cvae", ("model.posterior=from-decoder", "method.prior_variance=class")),
    ("flow_vae", (*SMALL["flow_vae"], "method.refiner=1", "method.refiner_steps=1")),
    ("linear_head", ("method.proximal=0.1", "method.weight_decay=0.1")),
]


@pytest.mark.parametrize(("method", "overrides"), CASES, ids=str)
def test_no_weights_make_a_silo_answer_otherwise_for_a_record(
    method: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """In the first round of a run, and in later ones, which go on from what the silo kept."""
    vectors, config = METHODS[method].modalities == ("vector",), config_for(method, *overrides)
    plain = records(SHAPES[vectors])
    worlds = [federation(plain), *(federation(with_record(plain, *extreme)) for extreme in EXTREMES[vectors])]
    silos = [service(tmp_path / str(number), world) for number, world in enumerate(worlds)]
    for run, (name, craft) in enumerate(CRAFTS.items()):
        for round in (1, 2, 3) if name == "detecting" else (1,):
            frame = task(config, worlds[0], craft, round, f"run-{run}")
            without, *others = (silo.answer(frame) for silo in silos)
            assert without.kind == ("refused" if name == "not a number" and frame.parts else "update"), without.header
            for other in others:
                assert form(other) == form(without), name


def test_weights_that_make_a_single_record_fail_are_answered_like_any(tmp_path: Path) -> None:
    """The attack: where gradients are written out, a loss that was not a number made the silo say that it failed."""
    plain, config = records(SHAPES[False]), config_for("fedprox")
    worlds = {"without": federation(plain), "with": federation(with_record(plain, 1.0, 0))}
    frame = task(config, worlds["without"], detecting)
    answers = {name: service(tmp_path / name, world).answer(frame) for name, world in worlds.items()}
    finite = {name: math.isfinite(own_loss(tmp_path / name)) for name in worlds}
    assert finite == {"without": True, "with": False}
    assert answers["with"].kind == "update"
    assert form(answers["with"]) == form(answers["without"])
    assert all_finite(answers["with"])


def magnifying(name: str, tensor: Tensor) -> Tensor:
    """The last layer of the encoder is shown the image times 1e18, and asked for a move of 1e-23 of its bias.

    Their product is no small number, but the squares of one are lost in float32, and so was its norm.
    """
    if tensor.shape == (36, 36) and name != "layers.4.weight":
        return 1e9 * torch.eye(36)
    found = torch.zeros_like(tensor)
    if tensor.shape == (4,):  # of the encoder: means, then logarithms of variances
        found[0] = 1e-23
    return found


@pytest.mark.parametrize(("clip", "kind"), [(1e-12, "refused"), (1e-6, "update")])
def test_no_weights_let_a_record_through_the_clip_bound(clip: float, kind: str, tmp_path: Path) -> None:
    """The attack: with a bound of 1e-12 an image came back to six digits from a round charged less than 0.002."""
    sgd = ("local.steps=1", "local.optimizer=sgd", "local.learning_rate=1.0", "local.keep_optimizer=false")
    quiet = ("model.hidden=[36, 36]", "model.likelihood=gaussian", "model.variance=1e20")  # no other gradients
    config = config_for("fedvae", *quiet, *sgd, "privacy.noise_multiplier=2000", f"privacy.clip={clip}")
    own = records(SHAPES[False])
    everybody = federation(replace(own, x=own.x * (torch.arange(UNITS) == 3).reshape(-1, 1, 1, 1)))
    answer = service(tmp_path, everybody, Grant(math.inf, 1e-5)).answer(task(config, everybody, magnifying))
    assert answer.kind == kind
    if kind == "update":
        (account,) = read_accounts(tmp_path / "ledger.sqlite")
        assert 0 < account.spent < 0.002
        moved = unpacked(answer.parts["blocks/encoder@all"], "encoder")["layers.4.weight"][0]
        likeness = float(torch.corrcoef(torch.stack((moved, own.x[3].flatten())))[0, 1])
        assert abs(likeness) < 0.9  # of 36 pixels and noise: above that once in 10^13 times


@pytest.mark.parametrize("method", ["fedvae", "fedprox"])  # gradients by what layers have at hand, and written out
def test_a_record_whose_loss_is_no_number_counts_for_nothing_and_spoils_nothing(method: str, tmp_path: Path) -> None:
    """Whatever it is, the update has the same bits; if another record is another one, it has not."""
    of_layers = {"layers.0.weight": 1e3, "layers.0.bias": -25e3, "layers.2.weight": 1.0, "layers.2.bias": 0.0}
    config, bright = config_for(method, "local.steps=1"), with_record(records(SHAPES[False]), 1.0, 0)
    another = bright.x.clone()
    another[0] *= 0.5
    worlds = {"bright": bright, "less": with_record(bright, 0.9, 0), "other": replace(bright, x=another)}
    frame = task(config, federation(bright), lambda name, tensor: torch.full_like(tensor, of_layers[name]))
    sent = {name: service(tmp_path / name, federation(own)).answer(frame) for name, own in worlds.items()}
    assert not any(math.isfinite(own_loss(tmp_path / name)) for name in worlds)
    assert all_finite(sent["bright"])
    assert sent["bright"] == sent["less"]
    assert sent["bright"] != sent["other"]


@dataclass
class Gpu(TorchFunctionMode):
    """A device that fails for good when something fails on it, as a GPU does that looks up a class there is not."""

    dead: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.dead:
            raise RuntimeError("CUDA error: device-side assert triggered")
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.dead = True
            raise

    def trains(self, patch: pytest.MonkeyPatch) -> None:
        """Have all steps of training done here."""
        whole = Trainer._steps

        def steps(*arguments: Any) -> Iterator[dict[str, Tensor]]:
            found = whole(*arguments)
            while True:
                with self:
                    terms = next(found, None)
                if terms is None:
                    return
                yield terms

        patch.setattr(Trainer, "_steps", steps)


@pytest.mark.parametrize("label", [-1, 3, 10**6])
@pytest.mark.parametrize("method", ["class_vae", "dp_cgan", "dp_cvae", "flow", "linear_head"])
def test_a_class_that_there_is_not_never_meets_a_device_that_it_would_end(
    method: str, label: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: with such a record a silo's GPU failed, its answer said so, and so did all later ones."""
    vectors, config = METHODS[method].modalities == ("vector",), config_for(method, *SMALL.get(method, ()))
    plain = records(SHAPES[vectors])
    worlds = {"without": federation(plain), "with": federation(with_record(plain, 0.5, label))}
    answers: dict[str, list[Frame]] = {}
    for name, world in worlds.items():
        gpu, silo = Gpu(), service(tmp_path / name, world)
        with monkeypatch.context() as patch:
            gpu.trains(patch)
            answers[name] = [silo.answer(task(config, worlds["without"], same, round)) for round in (1, 2)]
        assert not gpu.dead
    for without, other in zip(*answers.values(), strict=True):
        assert without.kind == "update"
        assert form(other) == form(without)


def test_a_record_of_no_class_counts_for_nothing_and_spoils_nothing(tmp_path: Path) -> None:
    """Whatever it is, the update has the same bits; and not those that it has with a class."""
    plain, config = records(SHAPES[True]), config_for("linear_head", "local.steps=1", "local.optimizer=sgd")
    worlds = {"one": (0.5, -1), "another": (0.25, -1), "too many": (0.5, 3), "of a class": (0.5, 1)}
    sent = {
        name: service(tmp_path / name, federation(with_record(plain, *own))).answer(
            task(config, federation(plain), same)
        )
        for name, own in worlds.items()
    }
    assert sent["one"] == sent["another"] == sent["too many"]
    assert sent["one"] != sent["of a class"]


def test_no_weights_lead_the_bound_below_what_the_operator_asks_for(tmp_path: Path) -> None:
    """The attack: gradients that vanish led a bound of 1 below any, and noise that is measured in it with it."""
    quiet = ("model.likelihood=gaussian", "model.variance=1e20", "privacy.clipping=quantile", "privacy.clip=1.0")
    config = config_for("fedvae", *quiet, "local.steps=200", "local.optimizer=sgd", "local.learning_rate=1e-9")
    everybody, floor = federation(records(SHAPES[False])), [0.25]

    def agreed(*_: Any) -> Grant:
        return replace(GRANT, min_clip=floor[-1])

    silo = SiloService(tmp_path, remote(everybody, 0), 0, lambda _: None, agreed)
    for round, least in enumerate((0.25, 0.5), start=1):  # also where a policy is changed
        floor.append(least)
        assert silo.answer(task(config, everybody, CRAFTS["zeros"], round)).kind == "update"
        kept = RoundStore(tmp_path / "rounds" / "run").state_before(round + 1).tensors
        assert float(kept["clip-bound/vae"]) == pytest.approx(least)
    assert Quantile(floor=0.5).bound(Lengths(torch.ones(1), torch.ones(1), torch.tensor(0.25))) == 0.5


def own_loss(home: Path) -> float:
    """Of the last round in a silo's own report."""
    return float(RunFolder.open(home / "runs" / "run").metrics()[-1]["train/vae/loss"])


def spoiling(craft: Craft, *, named: str = "encoder@all", drop: str = "") -> Callable[[Frame], Frame]:
    """A task in which the encoder's tensors are changed, or one of them is missing, or it bears another name."""

    def spoil(frame: Frame) -> Frame:
        (part,) = frame.parts.values()
        tensors = unpacked(part, named)
        return replace(frame, parts={named: packed({n: craft(n, t) for n, t in tensors.items() if n != drop})})

    return spoil


def saying(**header: Any) -> Callable[[Frame], Frame]:
    return lambda frame: replace(frame, header={**frame.header, **header})


def same(_: str, tensor: Tensor) -> Tensor:
    return tensor


def adding(frame: Frame) -> Frame:
    """What stays at a silo cannot be sent to it."""
    return replace(frame, parts={**frame.parts, "decoder@silo=here": frame.parts["encoder@all"]})


NOT_NUMBERS = r"tensor 'layers.0.bias' of block 'encoder@all' with values that are not all finite and at most 1e\+09"
SPOILT: dict[str, tuple[Callable[[Frame], Frame], str]] = {
    "not a number": (spoiling(one_number(torch.nan)), NOT_NUMBERS),
    "infinite": (spoiling(one_number(-torch.inf)), NOT_NUMBERS),
    "too large": (spoiling(one_number(1.1e9)), NOT_NUMBERS),
    "another dtype": (spoiling(lambda _, t: t.double()), r"as torch.float64 of shape \(5,\), not as torch.float32 of"),
    "another shape": (spoiling(lambda _, t: t[:-1]), r"as torch.float32 of shape \(4,\), not as torch.float32 of .*5,"),
    "a tensor too few": (spoiling(same, drop="layers.0.bias"), "sent the tensors of block 'encoder@all' .*; this exp"),
    "another block": (spoiling(same, named="coder@all"), "sent the blocks .*'coder@all'.*; this experiment sends"),
    "a block too many": (adding, r"sent the blocks .*'decoder@silo=here'.*; this experiment sends \['encoder@all'\]"),
    "no table": (lambda frame: replace(frame, parts={"encoder@all": b"?"}), "'encoder@all' is not a table of tensors"),
    "no experiment": (saying(experiment="rounds = -1"), "this is no task that this version can read: rounds = -1 must"),
    "a round beyond numbers": (saying(round=math.inf), "this is no task that this version can read: cannot convert"),
    "no such round": (saying(round=4), "round 4 of 3 is not one of this experiment"),
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILT.values(), ids=SPOILT)
def test_what_is_no_task_is_refused_with_its_reason_and_costs_nothing(
    spoil: Callable[[Frame], Frame], reason: str, tmp_path: Path
) -> None:
    everybody, config = federation(records(SHAPES[False])), config_for("fedvae", "sharing.scopes={decoder='silo'}")
    answer = service(tmp_path, everybody).answer(spoil(task(config, everybody, same)))
    assert answer.kind == "refused"
    assert re.search(reason, answer.header["reason"]), answer.header["reason"]
    assert not (tmp_path / "ledger.sqlite").exists()


def test_the_largest_weights_that_are_taken_are_taken(tmp_path: Path) -> None:
    everybody, config = federation(records(SHAPES[False])), config_for("fedvae")
    assert service(tmp_path, everybody).answer(task(config, everybody, one_number(1e9))).kind == "update"


@dataclass
class Clock:
    """Time that passes by being looked at, and by sleeping."""

    step: float
    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    def read(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.mark.parametrize(
    ("step", "pace", "slept"), [(0.75, 0.5, [0.25]), (1.5, 0.5, [0.0]), (0.125, 2.0, [1.875]), (0.75, 0.0, [])]
)
@pytest.mark.parametrize("failing", [True, False])
def test_work_ends_at_a_multiple_of_the_pace(step: float, pace: float, slept: list[float], failing: bool) -> None:
    clock = Clock(step)
    with contextlib.suppress(ZeroDivisionError), Pacemaker(clock.read, clock.sleep).kept(clock.now, pace):
        _ = 1 / (0 if failing else 1)
    assert clock.slept == slept


@pytest.mark.parametrize(
    ("overrides", "outcome", "slept"),
    [
        ((), "update", 1),
        ((), "failed", 1),
        (("privacy.mechanism=none",), "update", 0),
        (("rounds=2",), "refused", 0),  # of a round that is not one of the experiment: nothing is paid
    ],
)
def test_an_answer_that_was_paid_for_leaves_at_a_multiple_of_the_pace(
    overrides: tuple[str, ...], outcome: str, slept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody, config, clock = federation(records(SHAPES[False])), config_for("fedvae", *overrides), Clock(0.75)
    pacemaker = Pacemaker(clock.read, clock.sleep)
    if outcome == "failed":
        monkeypatch.setattr(Trainer, "train", lambda *_: 1 / 0)
    silo = service(tmp_path, everybody, replace(GRANT, pace=0.5), pacemaker=pacemaker)
    frame = task(config, everybody, same, 3 if outcome == "refused" else 1)
    assert silo.answer(frame).kind == outcome
    assert clock.slept == [0.25] * slept  # read when the task came, and at the end
    if slept:
        assert (clock.now - 100.75) % 0.5 == 0


def test_the_pace_covers_all_that_a_silo_does_before_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking, training, keeping and its own report; also where it sends what it had sent before."""
    everybody, config, clock = federation(records(SHAPES[False])), config_for("fedvae"), Clock(0.0)
    for owner, name in ((SiloService, "ready"), (Trainer, "train"), (RoundStore, "put"), (SiloService, "_report")):
        whole = getattr(owner, name)

        def slow(*arguments: Any, whole: Callable[..., Any] = whole) -> Any:
            clock.now += 0.75
            return whole(*arguments)

        monkeypatch.setattr(owner, name, slow)
    silo = service(tmp_path, everybody, replace(GRANT, pace=2.0), pacemaker=Pacemaker(clock.read, clock.sleep))
    frame = task(config, everybody, same)
    first = silo.answer(frame)
    assert (first.kind, clock.slept) == ("update", [1.0])
    assert silo.answer(frame) == first
    assert clock.slept == [1.0, 0.5]


def test_a_run_that_is_another_experiment_or_lost_its_state_costs_nothing(tmp_path: Path) -> None:
    """Both are known before it is paid for."""
    everybody, own = federation(records(SHAPES[False])), "sharing.scopes={encoder='silo'}"
    silo = service(tmp_path, everybody)
    first = silo.answer(task(config_for("fedvae", own), everybody, same))
    (before,) = read_accounts(tmp_path / "ledger.sqlite")
    other = silo.answer(task(config_for("fedvae", own, "local.learning_rate=0.5"), everybody, same))
    shutil.rmtree(tmp_path / "rounds")
    later = silo.answer(task(config_for("fedvae", own), everybody, same, round=2))
    assert [answer.kind for answer in (first, other, later)] == ["update", "refused", "refused"]
    assert "knows run 'run' as another experiment" in other.header["reason"]
    assert "what it kept of it is gone" in later.header["reason"]
    assert read_accounts(tmp_path / "ledger.sqlite") == [before]
    assert before.releases[0].charges == 1
