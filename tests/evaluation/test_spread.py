from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedloom.engines.base import initial_state
from fedloom.evaluation.spread import spread
from fedloom.evaluation.suite import Evaluator
from fedloom.experiment import Experiment
from fedloom.federation.records import Federation
from fedloom.methods.generator import Generator
from fedloom.streams import Streams
from support import tiny_config


def test_samples_that_are_all_alike_have_none() -> None:
    assert spread(torch.rand(1, 1, 8, 8).expand(50, 1, 8, 8), torch.rand(40, 1, 8, 8)) == 0.0


def test_it_is_the_ratio_of_mean_deviations() -> None:
    """Deviations over samples 1/2 and 0 in the two pixels, mean 1/4; over real images 1/2 and 1/4, mean 3/8."""
    samples = torch.tensor([[0.0, 0.3], [1.0, 0.3]])
    real = torch.tensor([[0.0, 0.0], [1.0, 0.5], [0.0, 0.0], [1.0, 0.5]])
    assert spread(samples, real) == pytest.approx(2 / 3)


def test_halves_of_real_images_have_about_one(held_out: list[Tensor]) -> None:
    for images in held_out:
        assert spread(images[::2], images[1::2]) == pytest.approx(1.0, abs=0.05)
        assert spread(images / 2, images) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("samples", "real"),
    [
        (torch.rand(3, 2), torch.zeros(3, 2)),
        (torch.zeros(3, 2), torch.zeros(3, 2)),
        (torch.full((3, 2), math.nan), torch.rand(3, 2)),
        (torch.full((3, 2), math.inf), torch.rand(3, 2)),
        (torch.rand(3, 2), torch.rand(0, 2)),
    ],
)
def test_what_is_not_finite_is_not_a_number(samples: Tensor, real: Tensor) -> None:
    assert math.isnan(spread(samples, real))


def test_the_suite_measures_every_group_against_its_own_held_out_images(tiny_federation: Federation) -> None:
    config = tiny_config('evaluation.metrics=["spread"]', "evaluation.samples=20")
    experiment = Experiment.of(config, tiny_federation)
    state = initial_state(experiment.method, tiny_federation, config)
    generator = Generator(experiment.method, state.server, tiny_federation.groups)
    found = Evaluator(tiny_federation, config.evaluation, Streams(config.seed)).evaluate(generator)
    expected = {}
    for index, group in enumerate(tiny_federation.groups):
        real = tiny_federation.test.values[tiny_federation.test.group == index]
        images = generator.sample(20, group=group, seed=config.seed)
        expected[f"spread/pixels/n20/group={group}"] = spread(images, real)
    assert len(found) == 2
    assert found == expected
