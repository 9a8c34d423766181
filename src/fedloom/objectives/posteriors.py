"""What trains a decoder, or an encoder, where the encoder may not see a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from fedloom.models.linear import LinearVAE
from fedloom.models.vae import VAE
from fedloom.objectives.base import Losses, Step


@dataclass(frozen=True)
class Evidence:
    """-log p(x) of a linear decoder, exactly."""

    noise: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The surprise at each example; there is no bound and nothing to sample."""
        assert isinstance(model, LinearVAE)
        return Losses(model.surprise(step.batch.x, step.batch.group), {})


@dataclass(frozen=True)
class Dreams:
    """-log q(z | x) for z ~ N(m_g, I) and x ~ p(x | z): an encoder for whatever the decoder is, and for nothing else.

    The sleep phase of Hinton, Dayan, Frey, Neal: "The 'wake-sleep' algorithm for unsupervised neural networks",
    Science 1995. It looks at the groups of a batch and not at its records.
    """

    latent: int
    shape: tuple[int, ...]  # of an example

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """For the latents and for the sample around its mean."""
        return {"dream": (self.latent,), "pixels": self.shape}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """How unlikely the encoder finds the latent that each example was made from."""
        assert isinstance(model, VAE)
        mean = model.prior_mean(step.batch.group)
        z = mean + step.noise["dream"][..., : mean.shape[-1]]
        images = model.likelihood.mean(model.decode(z, step.batch.group))
        dreamt = model.likelihood.sample(images, step.noise["pixels"]).detach()
        return Losses(-model.encode(dreamt, step.batch.group).log_density(z), {})
