from __future__ import annotations

import torch
from torch import nn

from fedloom.modalities.likelihoods import Bernoulli
from fedloom.models.networks import Routed
from fedloom.models.vae import VAE


def test_prior_means_follow_each_rows_group_and_are_never_part_of_the_state() -> None:
    means = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    vae = VAE(nn.Linear(3, 4), nn.Linear(2, 3), means, Bernoulli())
    assert vae.prior_mean(torch.tensor([1, 0, 1])).tolist() == [[2, 3], [0, 1], [2, 3]]
    assert sorted(vae.state_dict()) == ["decoder.bias", "decoder.weight", "encoder.bias", "encoder.weight"]


def test_encoder_halves_are_mean_and_log_variance() -> None:
    vae = VAE(nn.Identity(), nn.Identity(), torch.zeros(1, 2), Bernoulli())
    posterior = vae.encode(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.zeros(1, dtype=torch.int64))
    assert posterior.mean.tolist() == [[1, 2]]
    assert posterior.log_variance.tolist() == [[3, 4]]


def test_branches_decode_the_rows_of_their_group() -> None:
    branches = {group: nn.Linear(1, 1, bias=False) for group in (0, 1)}
    for group, branch in branches.items():
        nn.init.constant_(branch.weight, 10.0**group)
    vae = VAE(nn.Identity(), Routed(branches), torch.zeros(2, 1), Bernoulli())
    decoded = vae.decode(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1, 0, 1]))
    assert decoded.flatten().tolist() == [10, 2, 30]
