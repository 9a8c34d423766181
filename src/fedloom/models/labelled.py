"""Networks for labelled records: they are told the class, one-hot, beside their input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.modalities.likelihoods import Likelihood
from fedloom.models.gaussian import DiagonalGaussian
from fedloom.models.networks import mlp, route, route_all

FIRST = 0.01  # size of a linear decoder's first weights: vectors have length 1, and noise leaves few steps


class Told(nn.Module):
    """Linear layers that see a class beside their input."""

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.layers = mlp([inputs + classes, *hidden, outputs])

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        """One row for each row and its label."""
        told = functional.one_hot(label, self.classes).to(x.dtype)
        output: Tensor = self.layers(torch.cat([x, told], dim=-1))
        return output


class TellingDecoder(Told):
    """p(x | z, y), and the standard deviations of the latent prior where they are learned."""

    def __init__(self, latent: int, hidden: Sequence[int], outputs: int, classes: int, scales: int) -> None:
        super().__init__(latent, hidden, outputs, classes)
        self.log_scale = nn.Parameter(torch.zeros(scales, latent)) if scales else None  # one for all classes, or each

    def prior(self, label: Tensor, latent: int) -> DiagonalGaussian:
        """p(z | y), centred at 0."""
        zeros = torch.zeros(label.shape[0], latent, device=label.device)  # no len(): a graph takes any number
        if self.log_scale is None:
            return DiagonalGaussian(zeros, zeros)
        row = label if len(self.log_scale) > 1 else torch.zeros_like(label)
        return DiagonalGaussian(zeros, 2.0 * self.log_scale[row])


class ConditionalVAE(nn.Module):
    """Blocks ``encoder`` q(z | x, y) and ``decoder`` p(x | z, y) = N(mean, variance I)."""

    def __init__(self, encoder: nn.Module, decoder: TellingDecoder, latent: int, variance: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.latent, self.variance = latent, variance

    def encode(self, x: Tensor, label: Tensor) -> DiagonalGaussian:
        """q(z | x, y)."""
        return DiagonalGaussian.of(self.encoder(x, label))

    def decode(self, z: Tensor, label: Tensor) -> Tensor:
        """The mean of p(x | z, y)."""
        mean: Tensor = self.decoder(z, label)
        return mean

    def prior(self, label: Tensor) -> DiagonalGaussian:
        """p(z | y)."""
        return self.decoder.prior(label, self.latent)


class LinearConditionalVAE(ConditionalVAE):
    """A block ``decoder`` alone, one linear layer, whose best q(z | x, y) with independent latents is known."""

    def __init__(self, decoder: TellingDecoder, latent: int, variance: float) -> None:
        super().__init__(nn.Identity(), decoder, latent, variance)
        nn.init.normal_(self._layer.weight, std=FIRST)
        nn.init.zeros_(self._layer.bias)

    @property
    def _layer(self) -> nn.Linear:
        return cast("nn.Linear", self.decoder.layers[0])

    @torch.no_grad()
    def encode(self, x: Tensor, label: Tensor) -> DiagonalGaussian:
        """With P = I + W'W / s: the exact posterior's mean P^-1 W'(x - b_y) / s, and variances 1 / P_ii.

        The bound's slope along the best q is 0, so that no gradient need flow through it.
        """
        weight = self._layer.weight[:, : self.latent]
        residual = x - self.decode(x.new_zeros(len(x), self.latent), label)
        precision = torch.eye(self.latent, device=x.device) + weight.mT @ weight / self.variance
        # Weights so large that identity is lost beside their square leave what no number solves, and nothing to raise.
        mean = torch.linalg.solve_ex(precision, (residual @ weight / self.variance).mT).result.mT
        return DiagonalGaussian(mean, -precision.diagonal().log().expand_as(mean))


class TellingEncoder(nn.Module):
    """q(z | x, y): what an image's network says of z, moved by class, so that z need not say which class it is."""

    def __init__(self, network: nn.Module, latent: int, classes: int) -> None:
        super().__init__()
        self.network = network
        self.moved = nn.Linear(classes, 2 * latent, bias=False)

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        """Mean and log variance side by side."""
        statistics: Tensor = self.network(x) + self.moved(told)
        return statistics


class ClassVAE(nn.Module):
    """Blocks ``encoder`` q(z | x, y) and ``decoder`` p(x | z, y), by branches of groups; prior N(0, I)."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, classes: int, likelihood: Likelihood) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.classes, self.likelihood = classes, likelihood

    def encode(self, x: Tensor, group: Tensor, label: Tensor) -> DiagonalGaussian:
        """q(z | x, y)."""
        return DiagonalGaussian.of(route_all(self.encoder, (x, self._told(label, x)), group))

    def decode(self, z: Tensor, group: Tensor, label: Tensor) -> Tensor:
        """The likelihood's parameters given z and the class."""
        return route(self.decoder, torch.cat([z, self._told(label, z)], dim=-1), group)

    def _told(self, label: Tensor, like: Tensor) -> Tensor:
        # Each number has a mean square of 1, as those of z have: the latent would drown a plain 1 among many 0.
        return math.sqrt(self.classes) * functional.one_hot(label, self.classes).to(like.dtype)


class ConditionalGAN(nn.Module):
    """Blocks ``generator`` (noise to vector) and ``discriminator`` (vector to the logit of being real), both told."""

    def __init__(self, generator: Told, discriminator: Told) -> None:
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator

    def generate(self, z: Tensor, label: Tensor) -> Tensor:
        """One vector for each label."""
        x: Tensor = self.generator(z, label)
        return x

    def judge(self, x: Tensor, label: Tensor) -> Tensor:
        """A logit for each record: above 0 means that it is taken for real."""
        logit: Tensor = self.discriminator(x, label)
        return logit.squeeze(1)


class ConditionalFlow(nn.Module):
    """Block ``flow``: the velocity of a vector on its straight way from noise (time 0) to a record (time 1)."""

    def __init__(self, flow: Told) -> None:
        super().__init__()
        self.flow = flow

    def velocity(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        """Where a record moves at a time of the flow, dx / dt."""
        found: Tensor = self.flow(torch.cat([x, time], dim=-1), label)
        return found


class LinearHead(nn.Module):
    """Block ``head``: the logit of every class."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)

    def logits(self, x: Tensor) -> Tensor:
        """One row for each vector."""
        found: Tensor = self.head(x)
        return found
