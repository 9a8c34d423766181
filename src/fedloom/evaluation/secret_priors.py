"""Do secret priors protect a group? FissionVAE claims so from pictures; here are numbers, and an attack.

The claim: whoever does not know a group's prior mean cannot generate its images. The prior-swap experiment asks what
happens with another group's mean. The attack asks whether the mean is secret at all: the shared encoder maps a group's
images near it, so a handful of images of that kind gives it away. Whatever the outcome, there is no DP guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.models.vae import VAE
from fedloom.streams import Streams

HANDFUL = 5
ATTEMPTS = 100


@dataclass(frozen=True)
class PriorAttack:
    """How well a group's prior mean was estimated."""

    identified: float  # share of attempts whose estimate is nearest to the right group's mean
    relative_error: float  # mean distance to the true mean, over the mean distance between the groups' means


@torch.no_grad()
def attack_prior(model: VAE, images: Tensor, group: int, streams: Streams) -> PriorAttack:
    """Average the encoder's means over a handful of images of the group, many times over."""
    means = model.prior_means
    codes = model.encode(images, torch.full((len(images),), group, device=images.device)).mean
    picks = [streams.permutation("prior-attack", len(codes), silo=group, step=i)[:HANDFUL] for i in range(ATTEMPTS)]
    estimates = torch.stack([codes[pick].mean(dim=0) for pick in picks])
    distances = torch.cdist(estimates, means)
    apart = torch.pdist(means).mean()
    return PriorAttack(
        identified=(distances.argmin(dim=1) == group).double().mean().item(),
        relative_error=(distances[:, group].mean() / apart).item(),
    )
