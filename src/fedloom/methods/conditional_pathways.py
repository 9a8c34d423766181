"""How a conditional VAE makes vectors of a class: equation 3 of DP-CVAE, with or without the likelihood's own noise."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from fedloom.methods.base import Pathway
from fedloom.models.labelled import ConditionalVAE


def from_latent(model: nn.Module, noise: Mapping[str, Tensor], _: Tensor, label: Tensor) -> Tensor:
    """z ~ p(z|y), then the decoder's mean."""
    assert isinstance(model, ConditionalVAE)
    return model.decode(model.prior(label).sample(noise["z"]), label)


def from_likelihood(model: nn.Module, noise: Mapping[str, Tensor], group: Tensor, label: Tensor) -> Tensor:
    """z ~ p(z|y), then x ~ p(x|z,y)."""
    assert isinstance(model, ConditionalVAE)
    return from_latent(model, noise, group, label) + math.sqrt(model.variance) * noise["x"]


def conditional_pathways(latent: int, width: int) -> dict[str, Pathway]:
    """The decoder's mean, or a draw around it."""
    z, x = {"z": (latent,)}, {"x": (width,)}
    return {
        "z": Pathway(z, from_latent, "z ~ p(z|y) -> mean of x", ("decoder",), labelled=True),
        "x": Pathway(z | x, from_likelihood, "z ~ p(z|y) -> x ~ p(x|z,y)", ("decoder",), labelled=True),
    }
