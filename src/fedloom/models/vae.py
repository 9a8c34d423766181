"""Variational autoencoders with one prior mean per group: plain, told the group in the decoder, of two levels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.modalities.likelihoods import Likelihood
from fedloom.models.gaussian import DiagonalGaussian
from fedloom.models.networks import route


class VAE(nn.Module):
    """Blocks ``encoder`` q(z | x) and ``decoder`` p(x | z), prior N(m_g, I) for the group g of each row."""

    prior_means: Tensor

    def __init__(self, encoder: nn.Module, decoder: nn.Module, prior_means: Tensor, likelihood: Likelihood) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.likelihood = likelihood
        # A hyperparameter that silo and generator both know: no parameter, never sent.
        self.register_buffer("prior_means", prior_means, persistent=False)

    def encode(self, x: Tensor, group: Tensor) -> DiagonalGaussian:
        """q(z | x), by the branch of each row's group where the encoder has branches."""
        return DiagonalGaussian.of(route(self.encoder, x, group))

    def decode(self, z: Tensor, group: Tensor) -> Tensor:
        """The likelihood's parameters given z, by the branch of each row's group."""
        return route(self.decoder, z, group)

    def prior_mean(self, group: Tensor) -> Tensor:
        """The mean of the prior of each row's group, m_g."""
        return torch.index_select(self.prior_means, 0, group)


class GroupConditionalVAE(VAE):
    """The decoder sees z1 and the group's number, one-hot; everything else is as in the plain VAE."""

    def decode(self, z: Tensor, group: Tensor) -> Tensor:
        """The likelihood's parameters given z and the group."""
        told = functional.one_hot(group, len(self.prior_means)).to(z.dtype)
        return route(self.decoder, torch.cat([z, told], dim=-1), group)


class HierarchicalVAE(VAE):
    """Blocks ``encoder`` q(z1 | x), ``top_encoder`` q(z2 | z1), ``top_decoder`` p(z1 | z2) and ``decoder`` p(x | z1).

    p(z2) = N(0, I); ``prior_means`` are those of z1, where a predefined prior is used.
    """

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        top_encoder: nn.Module,
        top_decoder: nn.Module,
        prior_means: Tensor,
        likelihood: Likelihood,
    ) -> None:
        super().__init__(encoder, decoder, prior_means, likelihood)
        self.top_encoder = top_encoder
        self.top_decoder = top_decoder

    def encode_top(self, z1: Tensor, group: Tensor) -> DiagonalGaussian:
        """The posterior q(z2 | z1) of the upper latents."""
        return DiagonalGaussian.of(route(self.top_encoder, z1, group))

    def decode_top(self, z2: Tensor, group: Tensor) -> DiagonalGaussian:
        """The prior p(z1 | z2) of the lower latents."""
        return DiagonalGaussian.of(route(self.top_decoder, z2, group))
