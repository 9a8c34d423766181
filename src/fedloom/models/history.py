"""A VAE that remembers its own encoder as it was at the end of earlier rounds."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedloom.modalities.likelihoods import Likelihood
from fedloom.models.vae import VAE

FILLED, ENCODER = "history.filled", "encoder."


class History(nn.Module):
    """Earlier encoders, the newest first; ``filled`` is 1 for places that hold one, else 0."""

    filled: Tensor

    def __init__(self, encoder: nn.Module, places: int) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(copy.deepcopy(encoder) for _ in range(places))
        self.register_buffer("filled", torch.zeros(places))


class RememberingVAE(VAE):
    """A VAE with one more block, ``history``, that no phase trains."""

    def __init__(
        self, encoder: nn.Module, decoder: nn.Module, prior_means: Tensor, likelihood: Likelihood, places: int
    ) -> None:
        super().__init__(encoder, decoder, prior_means, likelihood)
        self.history = History(encoder, places)


def remembered(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A silo's weights after its round: the encoder joins the history, whose oldest entry is forgotten."""
    found = dict(weights)
    places = weights[FILLED].shape[0]
    for number in range(places):
        source = ENCODER if number == 0 else f"history.encoders.{number - 1}."
        target = f"history.encoders.{number}."
        found |= {target + n.removeprefix(source): t for n, t in weights.items() if n.startswith(source)}
    found[FILLED] = torch.cat([torch.ones_like(weights[FILLED][:1]), weights[FILLED][:-1]])
    return found
