from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedloom.config import ModelConfig
from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext
from fedloom.models.gan import GAN, dcgan_discriminator, dcgan_generator
from fedloom.objectives.adversarial import DiscriminatorLoss, GeneratorLoss
from fedloom.objectives.base import Step

CONTEXT = RoundContext(1, 1, (0,))
LN3 = math.log(3.0)


def batch_of(x: Tensor) -> Batch:
    zeros = torch.zeros(len(x), dtype=torch.int64)
    return Batch(x, zeros, zeros, torch.ones(len(x)))


def linear(weight: float) -> nn.Linear:
    layer = nn.Linear(1, 1)
    layer.load_state_dict({"weight": torch.tensor([[weight]]), "bias": torch.zeros(1)})
    return layer


@pytest.fixture
def scalar_gan() -> GAN:
    """G(z) = sigmoid(2 z), D(x) = 2 ln 3 (2 x - 1)."""
    return GAN(linear(2.0), linear(2 * LN3))


# z = ln(3) / 2 gives the fake 3/4, whose logit is ln 3; z = 0 gives the fake 1/2, whose logit is 0.
NOISE = {"z1": torch.tensor([[LN3 / 2], [0.0]])}


def test_the_discriminators_loss_by_hand(scalar_gan: GAN) -> None:
    """The record 1 has logit ln 9 and costs ln(10/9) as real; the record 0 has logit -ln 9 and costs ln 10."""
    losses = DiscriminatorLoss(1)(scalar_gan, Step(batch_of(torch.tensor([[1.0], [0.0]])), NOISE, {}, CONTEXT))
    real = torch.tensor([math.log(10 / 9), math.log(10)])
    fake = torch.tensor([math.log(4), math.log(2)])
    torch.testing.assert_close(losses.terms["real"], real)
    torch.testing.assert_close(losses.terms["fake"], fake)
    torch.testing.assert_close(losses.total, real + fake)


def test_the_generators_loss_and_slope_by_hand(scalar_gan: GAN) -> None:
    """-log sigmoid(logit): ln(4/3) and ln 2, whatever the records are.

    Slope in the generator's weight for the first fake s = 3/4:
    -(1 - sigmoid(ln 3)) * 2 ln 3 * 2 s (1 - s) * z = -(1/4) (2 ln 3) (3/8) (ln 3 / 2).
    """
    losses = GeneratorLoss(1)(scalar_gan, Step(batch_of(torch.full((2, 1), math.nan)), NOISE, {}, CONTEXT))
    torch.testing.assert_close(losses.total, torch.tensor([math.log(4 / 3), math.log(2)]))
    assert isinstance(scalar_gan.generator, nn.Linear)
    (slope,) = torch.autograd.grad(losses.total[0], scalar_gan.generator.weight)
    assert slope.item() == pytest.approx(-3 / 32 * LN3**2, rel=1e-5)


def test_losses_stay_finite_where_a_sigmoid_would_round_to_zero() -> None:
    sure = GAN(linear(0.0), linear(1000.0))
    losses = DiscriminatorLoss(1)(sure, Step(batch_of(torch.tensor([[1.0], [0.0]])), NOISE, {}, CONTEXT))
    torch.testing.assert_close(losses.terms["real"], torch.tensor([0.0, 1000.0]))


def small_gan() -> GAN:
    torch.manual_seed(0)
    model = ModelConfig(channels=(2, 3), latent=4)
    return GAN(dcgan_generator(model, (1, 8, 8)), dcgan_discriminator(model, (1, 8, 8)))


def test_the_discriminators_loss_sends_no_gradient_into_the_generator() -> None:
    model = small_gan()
    losses = DiscriminatorLoss(4)(model, Step(batch_of(torch.rand(3, 1, 8, 8)), {"z1": torch.randn(3, 4)}, {}, CONTEXT))
    torch.autograd.backward(losses.total.sum())
    assert all(parameter.grad is None for parameter in model.generator.parameters())
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.discriminator.parameters())


def test_the_generators_loss_reaches_the_generator_through_the_discriminator_as_it_is() -> None:
    model = small_gan()
    losses = GeneratorLoss(4)(model, Step(batch_of(torch.rand(3, 1, 8, 8)), {"z1": torch.randn(3, 4)}, {}, CONTEXT))
    gradients = torch.autograd.grad(losses.total.sum(), list(model.generator.parameters()))
    assert all(gradient.any() for gradient in gradients)
    assert all(parameter.grad is None for parameter in model.discriminator.parameters())


@pytest.mark.parametrize("objective", [DiscriminatorLoss(4), GeneratorLoss(4)])
def test_one_value_per_example_that_does_not_depend_on_the_others(objective: DiscriminatorLoss | GeneratorLoss) -> None:
    assert objective.noise == {"z1": (4,)}
    model, x, z = small_gan(), torch.rand(5, 1, 8, 8), torch.randn(5, 4)
    together = objective(model, Step(batch_of(x), {"z1": z}, {}, CONTEXT))
    assert together.total.shape == (5,)
    for row in range(5):
        alone = objective(model, Step(batch_of(x[row : row + 1]), {"z1": z[row : row + 1]}, {}, CONTEXT))
        torch.testing.assert_close(alone.total[0], together.total[row])
