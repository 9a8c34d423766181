"""How a conditional VAE makes vectors of a class: equation 3 of DP-CVAE, with or without the likelihood's own noise."""

from __future__ import annotations

import math

from torch import Tensor, nn

from fedloom.methods.base import Pathway, SampleInputs
from fedloom.models.labelled import ConditionalVAE


def from_latent(model: nn.Module, inputs: SampleInputs) -> Tensor:
    """z ~ p(z|y), then the decoder's mean."""
    assert isinstance(model, ConditionalVAE)
    return model.decode(model.prior(inputs.condition).sample(inputs.noise["z"]), inputs.condition)


def from_likelihood(model: nn.Module, inputs: SampleInputs) -> Tensor:
    """z ~ p(z|y), then x ~ p(x|z,y)."""
    assert isinstance(model, ConditionalVAE)
    return from_latent(model, inputs) + math.sqrt(model.variance) * inputs.noise["x"]


def conditional_pathways(latent: int, width: int) -> dict[str, Pathway]:
    """The decoder's mean, or a draw around it."""
    z, x = {"z": (latent,)}, {"x": (width,)}
    return {
        "z": Pathway(z, from_latent, "z ~ p(z|y) -> mean of x", ("decoder",), labelled=True),
        "x": Pathway(z | x, from_likelihood, "z ~ p(z|y) -> x ~ p(x|z,y)", ("decoder",), labelled=True),
    }
