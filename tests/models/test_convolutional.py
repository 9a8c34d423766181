from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from fedloom.config import Config, ModelConfig
from fedloom.errors import ConfigError
from fedloom.models.convolutional import conv_decoder, conv_encoder, halvings
from fedloom.models.gan import dcgan_discriminator, dcgan_generator
from fedloom.models.networks import NETWORKS
from fedloom.settings import parse

SMALL = ModelConfig(channels=(2, 3), latent=2)
SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 33, 33), (1, 9, 14), (3, 28, 33)]


def parameters_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("channels", [(), (4,), (2, 3), (4, 4, 4, 4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_decoder_puts_out_exactly_what_the_encoder_takes_in(
    shape: tuple[int, int, int], channels: tuple[int, ...]
) -> None:
    model = ModelConfig(channels=channels, latent=5)
    statistics = conv_encoder(model, shape)(torch.rand(2, *shape))
    assert statistics.shape == (2, 10)
    assert conv_decoder(model, shape, 7)(torch.randn(2, 7)).shape == (2, *shape)


def test_sides_are_halved_and_rounded_up() -> None:
    assert halvings((1, 28, 33), 4) == [(28, 33), (14, 17), (7, 9), (4, 5), (2, 3)]
    assert halvings((1, 8, 8), 4)[-1] == (1, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_pixel_is_left_out(shape: tuple[int, int, int]) -> None:
    """Without rectifiers every pixel must move the encoder, and the latent must move every pixel of the decoder."""
    torch.manual_seed(0)
    encoder, decoder = conv_encoder(SMALL, shape), conv_decoder(SMALL, shape, 2)
    for network in (encoder, decoder):
        network.layers = nn.Sequential(*[layer for layer in network.layers if not isinstance(layer, nn.ReLU)])  # type: ignore[union-attr]
    x = torch.rand(1, *shape, requires_grad=True)
    (slope,) = torch.autograd.grad(encoder(x)[0, 0], x)
    assert (slope != 0).all()
    with torch.no_grad():
        assert (decoder(torch.tensor([[1.0, 0.0]])) != decoder(torch.tensor([[0.0, 1.0]]))).all()


def test_parameters_counted_by_hand() -> None:
    """Kernels of 4 x 4; an image of 8 x 8 is halved twice, to 3 channels of 2 x 2 = 12 numbers."""
    first, second = 1 * 2 * 16 + 2, 2 * 3 * 16 + 3
    assert parameters_of(conv_encoder(SMALL, (1, 8, 8))) == first + second + (12 * 4 + 4)
    second, last = 3 * 2 * 16 + 2, 2 * 1 * 16 + 1
    assert parameters_of(conv_decoder(SMALL, (1, 8, 8), 2)) == (2 * 12 + 12) + second + last


def decoder(model: ModelConfig, shape: tuple[int, ...]) -> nn.Module:
    return conv_decoder(model, shape, model.latent)


@pytest.mark.parametrize("make", [conv_encoder, decoder, dcgan_generator, dcgan_discriminator])
def test_stacked_parameters_give_what_the_loop_gives(make: Callable[[ModelConfig, tuple[int, ...]], nn.Module]) -> None:
    shape = (1, 9, 14)
    torch.manual_seed(0)
    networks = [make(SMALL, shape) for _ in range(3)]
    x = torch.rand(3, 5, *(shape if make in (conv_encoder, dcgan_discriminator) else (2,)))
    parameters, buffers = stack_module_state(networks)
    assert not buffers
    skeleton = copy.deepcopy(networks[0]).to("meta")

    def call(own: dict[str, Tensor], rows: Tensor) -> Tensor:
        return functional_call(skeleton, own, (rows,))

    stacked = vmap(call)(parameters, x)
    for network, rows, output in zip(networks, x, stacked, strict=True):
        torch.testing.assert_close(output, network(rows), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "above_z1"), [("conv", "mlp"), ("deeper-mlp-conv", "deeper-mlp")])
def test_families_with_convolutions_are_linear_above_z1(name: str, above_z1: str) -> None:
    model = ModelConfig(hidden=(8,), channels=(2, 3), latent=3, top_hidden=(6,), top_latent=2)
    for block in ("top_encoder", "top_decoder"):
        ours, theirs = getattr(NETWORKS[name], block)(model), getattr(NETWORKS[above_z1], block)(model)
        assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]
    kinds = {type(m) for m in NETWORKS[name].decoder(model, (1, 28, 28), 3).modules()}
    assert nn.ConvTranspose2d in kinds
    convolves = any(isinstance(m, nn.Conv2d) for m in NETWORKS[name].encoder(model, (1, 28, 28)).modules())
    assert convolves == (name == "conv")


@pytest.mark.parametrize("shape", [(6,), (28, 28), (1, 2, 8, 8)])
def test_records_that_are_no_images_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"need images of shape \(channels, height, width\); these records have"):
        conv_encoder(SMALL, shape)
    with pytest.raises(ConfigError, match="need images"):
        conv_decoder(SMALL, shape, 2)


def test_channels_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"model.channels = \[8, 0\] must be a list of numbers of at least 1"):
        parse(Config, {"model": {"channels": [8, 0]}})
