"""The two-level VAE: z2 above z1 above x."""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.modalities.likelihoods import Likelihood
from fedloom.models.gaussian import DiagonalGaussian
from fedloom.models.networks import route
from fedloom.models.vae import VAE


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
