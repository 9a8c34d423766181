"""The generator and discriminator of a DCGAN (Radford, Metz, Chintala, "Unsupervised Representation Learning with Deep
Convolutional Generative Adversarial Networks", ICLR 2016), for images in [0, 1].
"""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.config import ModelConfig
from fedloom.models.convolutional import Downwards, Upwards
from fedloom.models.networks import Shape, route


class GAN(nn.Module):
    """Blocks ``generator`` (noise to image) and ``discriminator`` (image to the logit of being real)."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator

    def generate(self, z: Tensor, group: Tensor) -> Tensor:
        """Images in [0, 1], by the branch of each row's group where the generator has branches."""
        return route(self.generator, z, group).sigmoid()

    def judge(self, x: Tensor, group: Tensor) -> Tensor:
        """One logit per row: above 0 means real."""
        # Centred, as tanh images are in the original; a sigmoid image, centred, is tanh of half the logit.
        return route(self.discriminator, 2.0 * x - 1.0, group).squeeze(1)


# Group norm with a single group stands where the original has batch norm, whose statistics would be averaged between
# silos of different domains, and would make the loss of one example depend on the others in its batch. Both networks
# need it: without it in the discriminator, samples of Mixed MNIST hardly became images. The weights start as torch
# draws them, because the original's N(0, 0.02), made for batch norm, learned more slowly here.


def _generator_layers(channels: int) -> list[nn.Module]:
    return [nn.GroupNorm(1, channels), nn.ReLU()]


def _discriminator_layers(channels: int) -> list[nn.Module]:
    return [nn.GroupNorm(1, channels), nn.LeakyReLU(0.2)]


def dcgan_generator(model: ModelConfig, shape: Shape) -> nn.Module:
    """Transposed convolutions of the widths in ``model.channels``, in reverse order."""
    return Upwards(model.latent, model.channels, shape, _generator_layers)


def dcgan_discriminator(model: ModelConfig, shape: Shape) -> nn.Module:
    """Convolutions of the widths in ``model.channels``, then one logit."""
    return Downwards(shape, model.channels, 1, _discriminator_layers)
