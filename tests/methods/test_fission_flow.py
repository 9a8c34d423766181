"""Fission of a flow: what it learns, what its scopes move, how it goes on, and what each of its options changes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.config import Config
from fedloom.experiment import Experiment, Run, resume, train
from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method
from fedloom.models.unet import Embedding, FlowUNet, Middle, UNetSize, WayDown, WayUp
from fedloom.objectives.base import Step
from fedloom.objectives.rectified_flow import PATHS, PathName, RectifiedFlow
from labelled_images import CLASSES, GROUPS, picture_config, picture_federation
from support import assert_same_run

CONTEXT = RoundContext(1, 4, (0,))
BLOCKS = ("embedding", "down", "middle", "up")
SMALL = (
    "method.widths=[4, 8]",
    "method.attention=1",
    "method.told=['group', 'label']",
    "method.steps=2",
    "local.epochs=1",
)


def config(*overrides: str) -> Config:
    return picture_config("fission_flow", *SMALL, *overrides)


def method_of(*overrides: str) -> Method:
    return Experiment.of(config(*overrides), picture_federation()).method


# A flow whose velocity is known

MEAN, WIDTH = 0.5, 0.4
SHAPE = (1, 4, 4)


def velocity_of_a_gaussian(path: PathName, x: Tensor, time: float) -> Tensor:
    """E[a' e + b' x1 | a e + b x1 = x] for e ~ N(0, 1) and x1 ~ N(mean, width^2), pixel by pixel."""
    t, way = torch.tensor(time), PATHS[path]
    a, b, a_slope, b_slope = (each(t) for each in (way.noise, way.record, way.noise_slope, way.record_slope))
    slope = (a * a_slope + b * b_slope * WIDTH**2) / (a**2 + b**2 * WIDTH**2)
    return b_slope * MEAN + slope * (x - b * MEAN)


@pytest.mark.parametrize("path", ["straight", "arc"])
def test_the_flow_of_a_gaussian_is_learned_to_its_closed_form(path: PathName) -> None:
    torch.manual_seed(0)
    size = UNetSize((8,), 1, 0, 0.0)
    model = FlowUNet(Embedding(size, 0, 0), WayDown(1, size), Middle(size), WayUp(1, size))
    objective, steps, rows = RectifiedFlow(SHAPE, path=path), 200, 64
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    nobody = torch.zeros(rows, dtype=torch.int64)
    for _ in range(steps):
        x = (1 + MEAN + WIDTH * torch.randn(rows, *SHAPE)) / 2  # pixels; the flow is of those from -1 to 1
        noise = {name: torch.randn(rows, *shape) for name, shape in objective.noise.items()}
        loss = objective(model, Step(Batch(x, nobody, nobody, torch.ones(rows)), noise, {}, CONTEXT)).total.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    errors, moves = [], []
    for time in (0.1, 0.3, 0.5, 0.7, 0.9):
        t = torch.tensor(time)
        x = PATHS[path].noise(t) * torch.randn(rows, *SHAPE)
        x = x + PATHS[path].record(t) * (MEAN + WIDTH * torch.randn(rows, *SHAPE))
        wanted = velocity_of_a_gaussian(path, x, time)
        with torch.no_grad():
            found = model.velocity(x, torch.full((rows, 1), time), nobody, nobody)
        errors.append((found - wanted).square().mean().item())
        moves.append(wanted.var().item())
    assert sum(errors) < 0.05 * sum(moves), (errors, moves)  # a velocity that does not look at x has all of it
    assert max(errors) < 0.05


# Scopes


def trained(tmp_path: Path, *overrides: str) -> Run:
    return train(config("rounds=1", *overrides), tmp_path / "run", picture_federation())


def owners(block: str, scope: str) -> set[str]:
    """The copies of a block that the server has."""
    return {"global": {f"{block}@all"}, "group": {f"{block}@group={name}" for name in GROUPS}, "silo": set()}[scope]


CUTS: dict[str, Mapping[str, str]] = {
    "the upward half": {},
    "nothing": {"up": "global"},
    "up and middle": {"middle": "group"},
    "everything": dict.fromkeys(BLOCKS, "group"),
    "up at silos": {"up": "silo"},
    "only the embedding": {"embedding": "group", "up": "global"},
    "only the way down": {"down": "group", "up": "global"},
}


@pytest.mark.parametrize("scopes", CUTS.values(), ids=CUTS)
def test_scopes_move_exactly_their_blocks(tmp_path: Path, scopes: Mapping[str, str]) -> None:
    run = trained(tmp_path, *(f"sharing.scopes.{block}={scope}" for block, scope in scopes.items()))
    whole = {"embedding": "global", "down": "global", "middle": "global", "up": "group", **scopes}
    expected = set().union(*(owners(block, scope) for block, scope in whole.items()))
    assert {str(key) for key in run.generator().server.blocks} == expected
    sent = {key.partition("@")[0] for row in run.folder.egress() for key in row["blocks"]}
    assert sent == {block for block, scope in whole.items() if scope != "silo"}


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_a_group_shapes_the_images_of_this_group_alone(tmp_path: Path, block: str) -> None:
    run = trained(tmp_path, *(f"sharing.scopes.{each}=group" for each in BLOCKS))
    generator = run.generator()
    before = {group: generator.sample(4, group=group, label="right") for group in GROUPS}
    (key,) = (key for key in generator.server.blocks if str(key) == f"{block}@group=night")
    for tensor in generator.server.blocks[key].values():
        tensor.add_(0.3)
    after = {group: generator.sample(4, group=group, label="right") for group in GROUPS}
    assert torch.equal(before["day"], after["day"])
    assert not torch.equal(before["night"], after["night"])


# Going on


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """With all that a run carries along: moments, running means, a schedule, dropout, augmentation."""
    settings = config(
        "rounds=3",
        "local.optimizer=adamw",
        "local.keep_optimizer=true",
        "local.schedule=cosine",
        "local.warmup=1",
        "server.averaging=0.5",
        "method.dropout=0.1",
        "method.flips=true",
        "method.shifts=1",
        "method.unlabelled=0.3",
        "engine.keep_checkpoints=3",
    )
    whole = train(settings, tmp_path / "whole", picture_federation()).folder.path
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped)
    for number in (2, 3):
        shutil.rmtree(stopped / "checkpoints" / f"round-{number:04d}")
    (stopped / "status.json").unlink()
    resume(stopped, federation=picture_federation())
    assert_same_run(stopped, whole)


# What each option changes


def gradients(method: Method, *, group: int = 0, label: int = 1) -> dict[str, Tensor]:
    """Of the mean loss of a few records of one group and class, at weights that are no longer the first."""
    torch.manual_seed(1)
    model = method.build(Site("here", (group,)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    (phase,) = method.phases
    generator = torch.Generator().manual_seed(2)
    noise = {name: torch.randn(6, *shape, generator=generator) for name, shape in sorted(phase.objective.noise.items())}
    x = torch.rand(6, 1, 8, 8, generator=generator)
    batch = Batch(x, torch.full((6,), label), torch.full((6,), group), torch.ones(6))
    phase.objective(model, Step(batch, noise, {}, CONTEXT)).total.mean().backward()  # type: ignore[no-untyped-call]
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "option",
    [
        "method.path=arc",
        "method.times=logit-normal",
        "method.weight=record",
        "method.weight=noise",
        "method.flips=true",
        "method.shifts=2",
        "method.dropout=0.5",
        "method.draws=2",
        "method.unlabelled=0.9",
    ],
)
def test_every_option_of_the_loss_changes_the_gradient_of_every_block(option: str) -> None:
    plain, other = gradients(method_of()), gradients(method_of(option))
    for block in BLOCKS:
        names = [name for name in plain if name.startswith(f"{block}.")]
        assert any(not torch.allclose(plain[name], other[name], rtol=1e-3) for name in names), block


def test_a_record_teaches_the_row_of_its_own_group_and_class() -> None:
    found = gradients(method_of("method.unlabelled=0"), group=1, label=2)
    taught = {name: found[f"embedding.{name}.weight"].abs().sum(dim=0) > 0 for name in ("group", "label")}
    assert taught["group"].tolist() == [False, True]
    assert taught["label"].tolist() == [False, False, True, False]  # the last stands for no class


def test_a_record_whose_class_is_kept_back_teaches_what_stands_for_none() -> None:
    found = gradients(method_of(f"method.unlabelled={math.nextafter(1, 0)}"), label=2)
    assert (found["embedding.label.weight"].abs().sum(dim=0) > 0).tolist() == [False] * len(CLASSES) + [True]


@pytest.mark.parametrize("weight", ["record", "noise"])
def test_the_error_of_a_straight_path_is_weighed_as_its_name_says(weight: str) -> None:
    """v implies the record x_t + (1 - t) v and the noise x_t - t v, so their errors are (1 - t) and t times its own."""
    torch.manual_seed(3)
    (plain,), (weighed,) = (method_of(*o).phases for o in ((), (f"method.weight={weight}",)))
    model = method_of().build(Site("here", (0,)))
    noise = {name: torch.randn(5, *shape) for name, shape in plain.objective.noise.items()}
    ones = torch.ones(5, dtype=torch.int64)
    batch = Batch(torch.rand(5, 1, 8, 8), ones, 0 * ones, torch.ones(5))
    time = torch.special.ndtr(noise["time"]).flatten()
    factor = (1 - time) ** 2 if weight == "record" else time**2
    losses = [phase.objective(model, Step(batch, noise, {}, CONTEXT)).total for phase in (plain, weighed)]
    torch.testing.assert_close(losses[1], factor * losses[0])
