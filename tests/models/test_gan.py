from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.config import ModelConfig
from fedloom.errors import ConfigError
from fedloom.models.batch_norm import MaskedBatchNorm
from fedloom.models.gan import GAN, TYPICAL, BatchNormGAN, dcgan_discriminator, dcgan_generator, dcgan_parts

SMALL = ModelConfig(channels=(2, 3), latent=2)


def gan(shape: tuple[int, ...], model: ModelConfig = SMALL) -> GAN:
    torch.manual_seed(0)
    return GAN(dcgan_generator(model, shape), dcgan_discriminator(model, shape))


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 33, 9)])
def test_noise_becomes_images_in_the_unit_interval_and_images_one_logit_each(shape: tuple[int, ...]) -> None:
    model, group = gan(shape), torch.zeros(4, dtype=torch.int64)
    images = model.generate(10 * torch.randn(4, 2), group, torch.ones(4))
    assert images.shape == (4, *shape)
    assert images.min() >= 0
    assert images.max() <= 1
    assert model.judge(images, group, torch.ones(4)).shape == (4,)


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
    group, mask = torch.zeros(2, dtype=torch.int64), torch.ones(2)
    logits = model.judge(torch.tensor([[[[0.25]]], [[[1.0]]]]), group, mask)
    torch.testing.assert_close(logits, torch.tensor([-0.5, 1.0]))
    images = model.generate(torch.tensor([[0.0], [3.0]]).log1p(), group, mask)
    torch.testing.assert_close(images, torch.tensor([[0.5], [0.8]]))


def test_no_row_depends_on_the_others() -> None:
    """What batch norm would break, in values and in gradients."""
    model, group = gan((1, 9, 9)), torch.zeros(6, dtype=torch.int64)
    z, x = torch.randn(6, 2), torch.rand(6, 1, 9, 9)
    for network, rows in ((model.generate, z), (model.judge, x)):
        whole, part = network(rows, group, torch.ones(6)), network(rows[2:4], group[2:4], torch.ones(2))
        torch.testing.assert_close(whole[2:4], part)


def test_records_that_are_no_images_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"need images of shape \(channels, height, width\); these records have"):
        gan((6,))


# With batch norm


def batch_norm_gan(shape: tuple[int, ...] = (1, 9, 9), model: ModelConfig = SMALL) -> BatchNormGAN:
    torch.manual_seed(0)
    parts = {block: make(0) for block, make in dcgan_parts(model, shape, "batch").items()}
    return BatchNormGAN(model.latent, *parts.values())


def test_batch_norm_is_that_of_torch_over_the_rows_that_count() -> None:
    torch.manual_seed(0)
    theirs, ours, x = nn.BatchNorm2d(3), MaskedBatchNorm(3), 5 + 2 * torch.randn(6, 3, 4, 5)
    nn.init.uniform_(theirs.weight)
    nn.init.uniform_(theirs.bias)
    ours.load_state_dict({"weight": theirs.weight, "bias": theirs.bias})
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(ours(x, mask)[:4], theirs(x[:4]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x, torch.ones(6)), theirs(x), rtol=1e-4, atol=1e-5)


def test_norms_are_blocks_of_their_own_without_statistics() -> None:
    """Scale and shift of each normalised channel, but for the discriminator's first; no bias just before a norm."""
    plain, counts = (
        {name: sum(t.numel() for t in block.state_dict().values()) for name, block in model.named_children()}
        for model in (gan((1, 9, 9)), batch_norm_gan())
    )
    norms = 2 * (2 + 3)
    assert counts == {
        "generator": plain["generator"] - norms - 2,
        "discriminator": plain["discriminator"] - norms - 3,
        "generator_norms": norms,
        "discriminator_norms": 2 * 3,
    }
    assert "typical" not in batch_norm_gan().state_dict()


def test_rows_that_do_not_count_change_nothing() -> None:
    model, group = batch_norm_gan(), torch.zeros(6, dtype=torch.int64)
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    for network, rows in ((model.generate, torch.randn(6, 2)), (model.judge, torch.rand(6, 1, 9, 9))):
        counted = network(rows, group, mask)[:4]
        torch.testing.assert_close(counted, network(rows[:4], group[:4], mask[:4]))
        assert not torch.allclose(counted, network(rows, group, torch.ones(6))[:4])


def test_samples_are_normalised_by_the_statistics_of_typical_noise() -> None:
    """So that none depends on another; and typical noise, sampled, is what a batch of it is in training."""
    model, group = batch_norm_gan(), torch.zeros(TYPICAL, dtype=torch.int64)
    z = torch.randn(6, 2)
    torch.testing.assert_close(model.sample(z, group[:6])[2:4], model.sample(z[2:4], group[:2]))
    trained = model.generate(model.typical, group, torch.ones(TYPICAL))
    torch.testing.assert_close(model.sample(model.typical, group), trained)


@pytest.mark.parametrize("block", ["generator", "discriminator"])
def test_what_a_norm_puts_out_follows_its_scale_and_shift(block: str) -> None:
    """A scale of 0 leaves the shift alone of what came: the same for all rows."""
    model, group, mask = batch_norm_gan(), torch.zeros(4, dtype=torch.int64), torch.ones(4)
    for name, parameter in model.get_submodule(f"{block}_norms").named_parameters():
        nn.init.constant_(parameter, 0.3 if name.endswith("bias") else 0.0)
    rows = torch.randn(4, 2) if block == "generator" else torch.rand(4, 1, 9, 9)
    network = model.generate if block == "generator" else model.judge
    output = network(rows, group, mask)
    torch.testing.assert_close(output, output[:1].expand_as(output))
