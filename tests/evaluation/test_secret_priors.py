from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedloom.evaluation.secret_priors import attack_prior
from fedloom.modalities.likelihoods import Bernoulli
from fedloom.models.vae import VAE
from fedloom.streams import Streams

MEANS = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])


class Offset(nn.Module):
    """An encoder that maps an image of group g to its own values plus a fixed vector."""

    def __init__(self, offset: Tensor) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x + self.offset, torch.zeros_like(x)], dim=1)


@pytest.mark.parametrize("group", [0, 1])
def test_an_encoder_that_met_its_prior_gives_it_away(group: int) -> None:
    """Codes are the mean plus noise of deviation s: averaging 5 leaves s / sqrt(5) in each of 4 coordinates."""
    spread = 0.5
    images = spread * torch.randn(400, 4, generator=torch.Generator().manual_seed(1))
    model = VAE(Offset(MEANS[group]), nn.Identity(), MEANS, Bernoulli())
    attack = attack_prior(model, images, group, Streams(0))
    assert attack.identified == 1.0
    expected = spread / 5**0.5 * 1.88 / 2.0  # 1.88 is the mean of a chi variable of 4; the means lie 2 apart
    assert attack.relative_error == pytest.approx(expected, rel=0.1)


def test_an_encoder_that_ignores_the_prior_gives_chance() -> None:
    images = torch.randn(2000, 4, generator=torch.Generator().manual_seed(1))
    model = VAE(Offset(MEANS.mean(dim=0)), nn.Identity(), MEANS, Bernoulli())
    assert attack_prior(model, images, 0, Streams(0)).identified == pytest.approx(0.5, abs=0.2)
