"""Straightened flows: one step goes where many went, and the server alone learns it, in the last round."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines.one_answer import assert_alike
from fedloom.config import Config
from fedloom.engines.base import initial_state
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_distillation import DistillationPool
from fedloom.engines.reference import ReferenceEngine
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment, Run, resume, train
from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext
from fedloom.methods.image_flows import ImageFlow
from fedloom.methods.reflow import Reflow
from fedloom.methods.steps import Distilled, Steps
from fedloom.models.unet import Embedding, FlowUNet, Middle, UNetSize, WayDown, WayUp
from fedloom.objectives.base import Step
from fedloom.objectives.rectified_flow import Straightened
from fedloom.streams import Streams
from labelled_images import CLASSES, picture_config, picture_federation
from support import round_of

MEAN, WIDTH = 0.5, 0.4  # of pixels from -1 to 1
SMALL = ("method.widths=[8]", "method.attention=0", "method.steps=8", "method.reflow=1")
TAUGHT = ("server.samples=150", "server.epochs=2", "server.batch_size=50")
TEACHING = (*SMALL, *TAUGHT, "method.widths=[4, 8]", "local.epochs=1")


def config(*overrides: str) -> Config:
    return picture_config("fission_flow", *overrides)


class Known(FlowUNet):
    """The flow from N(0, 1) to N(MEAN, WIDTH^2), whose velocity is E[x - e | (1 - t) e + t x]."""

    def velocity(self, x: Tensor, time: Tensor, group: Tensor, label: Tensor, kept: Tensor | None = None) -> Tensor:
        t = time[:, :, None, None]
        slope = (t * WIDTH**2 - (1 - t)) / ((1 - t) ** 2 + t**2 * WIDTH**2)
        return MEAN + slope * (x - t * MEAN)


def network() -> FlowUNet:
    size = UNetSize((8,), 1, 0, 0.0)
    return FlowUNet(Embedding(size, 0, 0), WayDown(1, size), Middle(size), WayUp(1, size))


@torch.no_grad()
def ends(model: FlowUNet, start: Tensor, steps: int) -> Tensor:
    nobody = torch.zeros(len(start), dtype=torch.int64)
    return ImageFlow("euler", steps, 8).ends(model, start, nobody, nobody)


def distance(samples: Tensor) -> float:
    """Wasserstein distance of a Gaussian with their moments to the one that was to be met."""
    return math.hypot(samples.mean().item() - MEAN, samples.std().item() - WIDTH)


def test_after_it_one_step_goes_where_the_whole_way_went() -> None:
    """Before, one step from any noise e ends at E[x | e], the mean; straightened it ends at mean + width e."""
    torch.manual_seed(0)
    known, start = Known(*(nn.Identity() for _ in range(4))), torch.randn(512, 1, 4, 4)
    pairs = torch.cat([start, ends(known, start, 1000)], dim=1)
    torch.testing.assert_close(pairs[:, 1], MEAN + WIDTH * start[:, 0], atol=0.01, rtol=0.0)
    torch.testing.assert_close(ends(known, start, 1), torch.full_like(start, MEAN))

    student, objective, steps, rows = network(), Straightened(), 150, 64
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    nobody = torch.zeros(rows, dtype=torch.int64)
    for _ in range(steps):
        batch = Batch(pairs[torch.randint(len(pairs), (rows,))], nobody, nobody, torch.ones(rows))
        step = Step(batch, {"time": torch.randn(rows, 1)}, {}, RoundContext(1, 1, ()))
        optimizer.zero_grad()
        objective(student, step).total.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    fresh = torch.randn(512, 1, 4, 4)
    found, wanted = ends(student, fresh, 1), MEAN + WIDTH * fresh
    assert distance(ends(known, fresh, 1)) == pytest.approx(WIDTH)  # all of the spread is missing
    assert distance(found) < 0.2 * WIDTH
    assert (found - wanted).square().mean().item() < 0.2 * WIDTH**2  # sample by sample, too


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = config(*TEACHING, "rounds=2", "server.averaging=0.5", "engine.keep_checkpoints=2")
    return train(settings, tmp_path_factory.mktemp("taught") / "run", picture_federation())


def test_nothing_of_it_happens_before_the_last_round_and_then_it_is_all_that_is_sampled(taught: Run) -> None:
    first, last = (taught.generator(number).server for number in (1, 2))
    assert first.averages
    for key, block in last.blocks.items():
        for name, tensor in block.items():
            assert torch.equal(tensor, last.averages[key][name])  # and no mean with unstraightened weights
    rows = taught.folder.metrics()
    assert ["train/server/samples" in row for row in rows] == [False, True]
    assert rows[1]["train/server/samples"] == 2 * 150


def test_a_run_that_ended_with_it_takes_no_more_rounds(taught: Run) -> None:
    with pytest.raises(ConfigError, match="the last round left other weights"):
        resume(taught.folder.path, rounds=3, federation=picture_federation())


def test_few_steps_are_the_first_way_and_the_whole_way_stays(taught: Run) -> None:
    method = taught.generator().method
    assert list(method.pathways) == ["few", "flow"]
    few, flow = (way.generate for way in method.pathways.values())
    assert (few.solver, few.steps, flow.solver, flow.steps) == ("euler", 1, "heun", 8)  # type: ignore[attr-defined]


def test_pairs_are_of_every_group_and_class_and_of_none_and_begin_in_noise() -> None:
    experiment = Experiment.of(config(*TEACHING, "method.told=['group', 'label']"), picture_federation())
    assert isinstance(experiment.method.server_step, Steps)
    reflow = experiment.method.server_step.steps[-1]
    assert isinstance(reflow, Reflow)
    state = initial_state(experiment.method, experiment.federation, experiment.config).server
    pairs = reflow.pairs(state, round_of(state, [], RoundContext(2, 2, ()), Streams(3)))
    assert torch.bincount(pairs.group).tolist() == [150, 150]
    shares = torch.bincount(pairs.y[pairs.group == 1] + 1, minlength=len(CLASSES) + 1)
    assert (shares.max() - shares.min()).item() <= 1
    start, end = pairs.x.chunk(2, dim=1)
    assert start.std().item() == pytest.approx(1.0, abs=0.05)
    assert torch.equal(start, end)  # a new network's velocity is zero
    assert not torch.equal(start[:150], start[150:])


def test_engines_teach_the_same() -> None:
    experiment = Experiment.of(config(*TEACHING), picture_federation())
    state = initial_state(experiment.method, experiment.federation, experiment.config).server
    job = experiment.method.server_step(round_of(state, [], RoundContext(2, 2, ()), Streams(3))).distillation
    assert job is not None
    options = FusedOptions(torch.device("cpu"), chunk=2)
    pool = DistillationPool([experiment.config], lambda trainers: FusedEngine(trainers[0], options))
    ours, wanted = pool.distil({0: job})[0], ReferenceEngine(experiment.trainer).distil(job)
    assert isinstance(ours, Distilled)
    assert_alike(ours.weights, wanted.weights, job.weights)


def test_what_stays_at_silos_or_a_server_with_other_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.reflow straightens what the server has, but block 'up' is 'silo'"):
        Experiment.of(config(*TEACHING, "sharing.scopes.up=silo"), picture_federation())
    with pytest.raises(ConfigError, match=r"method\.reflow needs server\.step to be one of auto, mean, adam"):
        Experiment.of(config(*TEACHING, "server.step=mean+distil"), picture_federation())


def test_it_goes_with_an_adam_at_the_server(tmp_path: Path) -> None:
    run = train(config(*TEACHING, "rounds=1", "server.step=adam"), tmp_path / "run", picture_federation())
    assert run.folder.metrics()[0]["train/server/samples"] == 300
