"""The generator and discriminator of a DCGAN (Radford, Metz, Chintala, "Unsupervised Representation Learning with Deep
Convolutional Generative Adversarial Networks", ICLR 2016), for images in [0, 1].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fedloom.config import ModelConfig
from fedloom.models.batch_norm import BatchNorms, Hole, Normed
from fedloom.models.convolutional import Between, Chain, Downwards, Upwards, one_after_the_other
from fedloom.models.networks import Shape, route, route_all
from fedloom.streams import Streams

Norm = Literal["group", "batch"]
TYPICAL = 512  # rows of noise whose statistics samples are normalised by


class GAN(nn.Module):
    """Blocks ``generator`` (noise to image) and ``discriminator`` (image to the logit of being real).

    A mask says which rows of a batch count; where no example depends on another nobody looks at it.
    """

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator

    def generate(self, z: Tensor, group: Tensor, mask: Tensor) -> Tensor:
        """Images in [0, 1], by the branch of each row's group where the generator has branches."""
        return self._through("generator", z, group, mask).sigmoid()

    def judge(self, x: Tensor, group: Tensor, mask: Tensor) -> Tensor:
        """One logit per row: above 0 means real."""
        # Centred, as tanh images are in the original; a sigmoid image, centred, is tanh of half the logit.
        return self._through("discriminator", 2.0 * x - 1.0, group, mask).squeeze(1)

    def sample(self, z: Tensor, group: Tensor) -> Tensor:
        """Images when training is over, none of which depends on another."""
        return self.generate(z, group, torch.ones_like(z[:, 0]))

    def _through(self, block: str, x: Tensor, group: Tensor, _: Tensor) -> Tensor:
        return route(self.get_submodule(block), x, group)


class BatchNormGAN(GAN):
    """With the batch norm of the original, in blocks ``generator_norms`` and ``discriminator_norms`` of their own.

    There are no running statistics, which would be of records. A discriminator is never called when training is over,
    and what a generator sees is noise: its samples are normalised by the statistics of a fixed batch of it.
    """

    typical: Tensor

    def __init__(
        self,
        latent: int,
        generator: nn.Module,
        discriminator: nn.Module,
        generator_norms: nn.Module,
        discriminator_norms: nn.Module,
    ) -> None:
        super().__init__(generator, discriminator)
        self.generator_norms = generator_norms
        self.discriminator_norms = discriminator_norms
        self.register_buffer("typical", Streams(0).normal("typical", TYPICAL, latent), persistent=False)

    def sample(self, z: Tensor, group: Tensor) -> Tensor:
        """Images when training is over, none of which depends on another."""
        rows = torch.cat([self.typical, z])
        counted = torch.arange(len(rows), device=z.device) < TYPICAL
        return self.generate(rows, torch.cat([group[:1].expand(TYPICAL), group]), counted.to(z.dtype))[TYPICAL:]

    def _through(self, block: str, x: Tensor, group: Tensor, mask: Tensor) -> Tensor:
        norms = self.get_submodule(f"{block}_norms")

        def norm(number: int, values: Tensor) -> Tensor:
            normal: Tensor = route_all(norms, (number, values, mask), group)
            return normal

        output: Tensor = route_all(self.get_submodule(block), (x, norm), group)
        return output


# Group norm with a single group is the usual choice, because batch norm makes the loss of one example depend on the
# others in its batch, which no mechanism of privacy can guard. Both networks need a norm: without one in the
# discriminator, samples of Mixed MNIST hardly became images. The weights start as torch draws them, because the
# original's N(0, 0.02) learned more slowly here.
def _normed(norm: Norm, activation: Callable[[], nn.Module], bare: int = 0) -> tuple[Between, Chain]:
    """What follows a convolution, and how all is called; batch norm leaves the first ``bare`` ones alone."""
    if norm == "group":
        return lambda channels: [nn.GroupNorm(1, channels), activation()], one_after_the_other
    numbers = itertools.count(-bare)

    def between(_: int) -> list[nn.Module]:
        number = next(numbers)
        return [Hole(number), activation()] if number >= 0 else [activation()]

    return between, Normed


def dcgan_generator(model: ModelConfig, shape: Shape, norm: Norm = "group") -> nn.Module:
    """Transposed convolutions of the widths in ``model.channels``, in reverse order."""
    return Upwards(model.latent, model.channels, shape, *_normed(norm, nn.ReLU))


def dcgan_discriminator(model: ModelConfig, shape: Shape, norm: Norm = "group") -> nn.Module:
    """Convolutions of the widths in ``model.channels``, then one logit."""
    return Downwards(shape, model.channels, 1, *_normed(norm, partial(nn.LeakyReLU, 0.2), bare=1))


def dcgan_parts(model: ModelConfig, shape: Shape, norm: Norm) -> dict[str, Callable[[int], nn.Module]]:
    """How the blocks of such a model are made, whatever the group; batch norms are blocks of their own."""
    parts: dict[str, Callable[[int], nn.Module]] = {
        "generator": lambda _: dcgan_generator(model, shape, norm),
        "discriminator": lambda _: dcgan_discriminator(model, shape, norm),
    }
    if norm == "batch":  # the original has none at the generator's output and the discriminator's input
        parts["generator_norms"] = lambda _: BatchNorms(model.channels[::-1])
        parts["discriminator_norms"] = lambda _: BatchNorms(model.channels[1:])
    return parts
