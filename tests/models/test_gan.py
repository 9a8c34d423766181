from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.config import ModelConfig
from fedloom.errors import ConfigError
from fedloom.models.gan import GAN, dcgan_discriminator, dcgan_generator

SMALL = ModelConfig(channels=(2, 3), latent=2)


def gan(shape: tuple[int, ...], model: ModelConfig = SMALL) -> GAN:
    torch.manual_seed(0)
    return GAN(dcgan_generator(model, shape), dcgan_discriminator(model, shape))


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 33, 9)])
def test_noise_becomes_images_in_the_unit_interval_and_images_one_logit_each(shape: tuple[int, ...]) -> None:
    model, group = gan(shape), torch.zeros(4, dtype=torch.int64)
    images = model.generate(10 * torch.randn(4, 2), group)
    assert images.shape == (4, *shape)
    assert images.min() >= 0
    assert images.max() <= 1
    assert model.judge(images, group).shape == (4,)


def test_parameters_counted_by_hand() -> None:
    """As in the VAE, and scale and shift for each of 2 + 3 normalised channels; the discriminator has one output."""
    counts = {name: sum(p.numel() for p in block.parameters()) for name, block in gan((1, 8, 8)).named_children()}
    norms = 2 * (2 + 3)
    assert counts == {
        "generator": (2 * 12 + 12) + (3 * 2 * 16 + 2) + (2 * 16 + 1) + norms,
        "discriminator": (2 * 16 + 2) + (2 * 3 * 16 + 3) + (12 + 1) + norms,
    }


def test_the_discriminator_sees_images_centred_and_the_generator_ends_in_a_sigmoid() -> None:
    model = GAN(nn.Identity(), nn.Flatten())
    group = torch.zeros(2, dtype=torch.int64)
    torch.testing.assert_close(model.judge(torch.tensor([[[[0.25]]], [[[1.0]]]]), group), torch.tensor([-0.5, 1.0]))
    torch.testing.assert_close(
        model.generate(torch.tensor([[0.0], [3.0]]).log1p(), group), torch.tensor([[0.5], [0.8]])
    )


def test_no_row_depends_on_the_others() -> None:
    """What batch norm would break, in values and in gradients."""
    model, group = gan((1, 9, 9)), torch.zeros(6, dtype=torch.int64)
    z, x = torch.randn(6, 2), torch.rand(6, 1, 9, 9)
    torch.testing.assert_close(model.generate(z, group)[2:4], model.generate(z[2:4], group[2:4]))
    torch.testing.assert_close(model.judge(x, group)[2:4], model.judge(x[2:4], group[2:4]))


def test_records_that_are_no_images_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"need images of shape \(channels, height, width\); these records have"):
        gan((6,))
