"""The variational autoencoder with one prior mean per group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
