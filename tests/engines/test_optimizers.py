"""Optimisers against torch's own, against each other in both engines, and across a resumption."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from engines.killing import train_until_write
from engines.one_answer import LARGER, PRIVATE, UNEQUAL, assert_one_answer, config_of, trainer_of
from fedloom.config import Config, LocalConfig
from fedloom.engines.base import Job
from fedloom.engines.fused import FusedOptions
from fedloom.engines.optimizers import LocalOptimizer, adam_of_stack, gradients_of_mean, shortened
from fedloom.engines.reference import ReferenceEngine
from fedloom.errors import ConfigError
from fedloom.experiment import load, resume, train
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import OptimizerRule
from fedloom.methods.steps import ServerState
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.sharing.plan import BlockKey
from support import assert_same_run, tiny_config

ROUNDS = 6
SHAPES = {"weight": (3, 4), "bias": (3,)}
CPU = torch.device("cpu")

ADAM = OptimizerRule("adam", 0.1)
ADAMW = OptimizerRule("adamw", 0.1, betas=(0.8, 0.95), weight_decay=0.3)
MOMENTUM = OptimizerRule("sgd", 0.1, momentum=0.9, weight_decay=0.3)


def torchs(plan: OptimizerRule, parameters: list[Tensor]) -> Optimizer:
    made: dict[str, Callable[[], Optimizer]] = {
        "adam": lambda: Adam(parameters, plan.learning_rate, plan.betas),
        "adamw": lambda: AdamW(parameters, plan.learning_rate, plan.betas, weight_decay=plan.weight_decay),
        "sgd": lambda: SGD(parameters, plan.learning_rate, plan.momentum, weight_decay=plan.weight_decay),
    }
    return made[plan.name]()


def gradients_of(silo: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * silo + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def moved_by_torch(plan: OptimizerRule, silo: int, steps: int) -> dict[str, Tensor]:
    parameters = {name: torch.ones(shape, requires_grad=True) for name, shape in SHAPES.items()}
    optimizer = torchs(plan, list(parameters.values()))
    for step in range(steps):
        for name, gradient in gradients_of(silo, step).items():
            parameters[name].grad = gradient
        if plan.clip_norm:
            clip_grad_norm_(list(parameters.values()), plan.clip_norm)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("silos", [1, 3])
@pytest.mark.parametrize("clip", [0.0, 1.5, 100.0])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("plan", [ADAM, ADAMW, MOMENTUM, OptimizerRule("sgd", 0.1)], ids=lambda plan: str(plan.name))
def test_a_stack_moves_as_torch_moves_each_of_it(plan: OptimizerRule, keep: bool, clip: float, silos: int) -> None:
    plan = OptimizerRule(**{**vars(plan), "keep": keep, "clip_norm": clip})
    stacked = {name: torch.ones(silos, *shape) for name, shape in SHAPES.items()}
    optimizer = LocalOptimizer(plan, stacked)
    for step in range(4):
        drawn = [gradients_of(silo, step) for silo in range(silos)]
        optimizer.step(silos, [torch.stack([own[name] for own in drawn]) for name in SHAPES])
    for silo in range(silos):
        for name, wanted in moved_by_torch(plan, silo, 4).items():
            torch.testing.assert_close(stacked[name][silo], wanted, rtol=2e-6, atol=1e-7)


def test_what_is_kept_goes_on_as_if_nothing_had_been() -> None:
    for plan in (ADAM, ADAMW, MOMENTUM):
        plan = OptimizerRule(**{**vars(plan), "keep": True})
        whole = {name: torch.ones(2, *shape) for name, shape in SHAPES.items()}
        first = LocalOptimizer(plan, whole)
        first.step(2, [torch.stack([gradients_of(s, 0)[name] for s in (0, 1)]) for name in SHAPES])
        parted = {name: tensor[1:].clone() for name, tensor in whole.items()}
        second = LocalOptimizer(plan, parted)
        second.load(0, {name: tensor[1] for name, tensor in first.kept(2).items()})
        first.step(2, [torch.stack([gradients_of(s, 1)[name] for s in (0, 1)]) for name in SHAPES])
        second.step(1, [gradients_of(1, 1)[name].unsqueeze(0) for name in SHAPES])
        assert all(torch.equal(parted[name][0], whole[name][1]) for name in SHAPES)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_what_is_compiled_is_the_same_rule(decay: float) -> None:
    parameter, m, v, counts = torch.ones(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(1)
    for step in range(3):
        gradient = torch.stack([gradients_of(silo, step)["weight"] for silo in (0, 1)])
        adam_of_stack([parameter], [gradient], [m], [v], counts, 0.1, (0.9, 0.999), decay)
    wanted = moved_by_torch(OptimizerRule("adamw", 0.1, weight_decay=decay), 1, 3)["weight"]
    torch.testing.assert_close(parameter[1], wanted, rtol=1e-5, atol=1e-6)


def test_a_gradient_is_shortened_silo_by_silo_over_all_its_parameters() -> None:
    long, short = shortened([torch.tensor([[3.0, 0.0], [0.3, 0.0]]), torch.tensor([4.0, 0.4])], 2.5)
    assert torch.allclose(long, torch.tensor([[1.5, 0.0], [0.3, 0.0]]), rtol=1e-6)  # norms 5 and 0.5
    assert torch.allclose(short, torch.tensor([2.0, 0.4]), rtol=1e-6)


def schedulers(optimizer: Optimizer, schedule: str, warmup: int) -> LRScheduler:
    """Torch's, a step for each round."""
    rest: LRScheduler = ConstantLR(optimizer, factor=1.0)
    if schedule == "cosine":
        rest = CosineAnnealingLR(optimizer, T_max=ROUNDS - warmup)
    if not warmup:
        return rest
    rising = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    return SequentialLR(optimizer, [rising, rest], milestones=[warmup])


@pytest.mark.parametrize(
    ("schedule", "warmup"), [("constant", 0), ("constant", 3), ("cosine", 0), ("cosine", 2), ("cosine", 6)]
)
def test_rates_are_those_of_torchs_schedulers(schedule: str, warmup: int) -> None:
    plan = OptimizerRule.of(LocalConfig(schedule=schedule, warmup=warmup, learning_rate=0.2))  # type: ignore[arg-type]
    optimizer = SGD([torch.zeros(1, requires_grad=True)], 0.2)
    if warmup < ROUNDS:
        wanted, scheduler = [], schedulers(optimizer, schedule, warmup)
        for _ in range(ROUNDS):
            wanted.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    else:
        wanted = [0.2 * number / warmup for number in range(1, ROUNDS + 1)]
    found = [plan.rate(RoundContext(number, ROUNDS, ())) for number in range(1, ROUNDS + 1)]
    assert found == pytest.approx(wanted, rel=1e-12)
    assert plan.scheduled == (len(set(wanted)) > 1)
    assert plan.rate(RoundContext(0, ROUNDS, ())) == found[0]  # before the first round


def test_a_round_moves_by_its_own_rate_also_where_it_is_read_from_the_device() -> None:
    plan = OptimizerRule("sgd", 0.5, schedule="cosine")
    for as_tensor in (False, True):
        weight = torch.zeros(1, 1)
        optimizer = LocalOptimizer(plan, {"weight": weight})
        if as_tensor:  # as on a GPU
            optimizer._rate = torch.tensor(0.5)
        for number in (1, 2):
            optimizer.begin(RoundContext(number, 2, ()))
            optimizer.step(1, [torch.ones(1, 1)])
        assert weight.item() == pytest.approx(-0.5 * (1 + (1 + math.cos(math.pi / 2)) / 2), rel=1e-6)


OPTIMIZERS = {
    "adam": ("local.optimizer=adam",),
    "adamw": ("local.optimizer=adamw", "local.weight_decay=0.2"),
    "sgd": ("local.optimizer=sgd", "local.learning_rate=1e-3", "local.momentum=0.9", "local.weight_decay=0.2"),
}
SCHEDULES = {"constant": (), "warm-up, cosine": ("rounds=9", "local.warmup=2", "local.schedule=cosine")}
CLIPPING = {"any length": (), "clipped": ("local.clip_norm=5",)}
AVERAGING = {"newest": (), "averaged": ("server.averaging=0.7",)}
ALL = (*OPTIMIZERS["sgd"], *SCHEDULES["warm-up, cosine"], *CLIPPING["clipped"], *AVERAGING["averaged"])


@pytest.mark.parametrize("names", itertools.product(OPTIMIZERS, SCHEDULES, CLIPPING, AVERAGING), ids="-".join)
def test_engines_agree(names: tuple[str, str, str, str]) -> None:
    chosen = zip((OPTIMIZERS, SCHEDULES, CLIPPING, AVERAGING), names, strict=True)
    overrides = [each for table, name in chosen for each in table[name]]
    keep = f"local.keep_optimizer={str(names[2] == 'clipped').lower()}"
    trainer, start = trainer_of(config_of(*overrides, keep), UNEQUAL)
    assert_one_answer(trainer, start, ((1, 3), (0, 1, 2), (0, 1)), FusedOptions(CPU, chunk=2))


def test_engines_agree_under_dp_sgd() -> None:
    trainer, start = trainer_of(config_of(*ALL, *PRIVATE, "local.keep_optimizer=true"), LARGER)
    assert_one_answer(trainer, start, ((0, 1), (1, 4)), FusedOptions(CPU))


def test_clipping_counts_after_the_noise() -> None:
    """So little is left of a gradient that noise of any size moves a weight by no more."""
    config = config_of(
        "local.optimizer=sgd", "local.learning_rate=1.0", "local.clip_norm=1e-3", "local.steps=1", *PRIVATE
    )
    trainer, start = trainer_of(config, LARGER)
    after, _ = ReferenceEngine(trainer).round(Job(start, RoundContext(1, 1, (1,)), lambda _: None))
    way = [
        (t - start.server.blocks[key][n]).norm() for key, part in after.server.blocks.items() for n, t in part.items()
    ]
    assert torch.stack(way).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_what_is_sampled_is_the_running_mean() -> None:
    key = BlockKey("decoder", "all")
    blocks = {key: {"weight": torch.tensor([4.0]), "count": torch.tensor(7)}}
    first = ServerState(blocks).averaged({}, 0.75)
    assert first.sampled[key]["weight"].item() == 4.0  # nothing to average yet
    following = ServerState({key: {"weight": torch.tensor([8.0]), "count": torch.tensor(9)}})
    second = following.averaged(first.averages, 0.75)
    assert second.sampled[key]["weight"].item() == 5.0
    assert second.sampled[key]["count"].item() == 9
    assert second.blocks[key]["weight"].item() == 8.0  # which goes down
    assert following.averaged(first.averages, 0.0).sampled is following.blocks


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_a_resumed_run_has_the_same_bits(engine: str, tmp_path: Path) -> None:
    overrides = (*ALL, "rounds=5", "local.keep_optimizer=true", f"engine.name={engine}")
    config = tiny_config(*overrides)
    train(config, tmp_path / "whole")
    train_until_write(config, tmp_path / "killed", 24)
    assert 1 < RunFolder.open(tmp_path / "killed").rounds_done < 5
    resume(tmp_path / "killed")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    found = load_checkpoint(tmp_path / "killed").server
    averages = {name for name in found if name.startswith("averages/")}
    assert len(averages) == sum(name.startswith("blocks/") for name in found) > 0
    generator = load(tmp_path / "killed").generator()
    decoder = generator.model(generator.groups[0]).state_dict()
    own = {n.removeprefix("decoder."): t for n, t in decoder.items() if n.startswith("decoder.")}
    (key,) = generator.method.generating.prefixes("decoder", Site("server", (0,))).values()
    assert own
    for name, tensor in own.items():
        assert torch.equal(tensor, found[f"averages/{key}/{name}"])
        assert not torch.equal(tensor, found[f"blocks/{key}/{name}"])


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("local.momentum=0.9",), r"local\.momentum = 0\.9 needs local\.optimizer = 'sgd'"),
        (("local.momentum=1",), r"local\.momentum = 1 must be at least 0 and below 1"),
        (("local.weight_decay=0.1",), r"local\.weight_decay = 0\.1 needs local\.optimizer = 'adamw' or 'sgd'"),
        (("local.warmup=4", "rounds=3"), r"local\.warmup = 4 must be at most rounds = 3"),
        (("local.schedule=linear",), r"local\.schedule: unknown value 'linear'"),
        (("local.optimizer=adagrad",), r"local\.optimizer: unknown value 'adagrad'"),
        (("local.clip_norm=-1",), r"local\.clip_norm = -1 must be at least 0"),
        (("server.averaging=1",), r"server\.averaging = 1 must be at least 0 and below 1"),
    ],
)
def test_mistakes_are_named(overrides: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        trainer_of(config_of(*overrides), UNEQUAL)


def test_an_experiment_without_later_settings_is_the_one_that_it_was() -> None:
    """The digest of the defaults before there were schedules, momentum, clipping and averaging."""
    assert Config().digest() == "23edeec49e30aad97fc532deba29976c549b7fa3465613547ec41f39f0462b11"
    assert tiny_config("local.clip_norm=1").digest() != tiny_config().digest()
    assert tiny_config("local.schedule=cosine").digest() != tiny_config("local.warmup=1").digest()


def test_the_plain_gradient_is_that_of_the_mean_over_real_rows() -> None:
    """d/dw of mean((w x)^2) over x = 1, 3 is (2 w + 18 w) / 2 = 10 w; the masked row x = 100 does not exist."""
    w = nn.Parameter(torch.tensor(2.0))
    values, mask = (w * torch.tensor([1.0, 100.0, 3.0])) ** 2, torch.tensor([1.0, 0.0, 1.0])
    (gradient,) = gradients_of_mean(values, mask, [w])
    assert gradient.item() == 20


def test_a_parameter_that_the_losses_do_not_reach_gets_zeros() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    gradients = gradients_of_mean(used.sum().expand(4), torch.ones(4), [used, unused])
    assert [gradient.tolist() for gradient in gradients] == [[1, 1], [0, 0, 0]]
