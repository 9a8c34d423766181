from __future__ import annotations

import torch
from torch import nn

from fedloom.privacy.mechanism import NoPrivacy


def test_the_plain_gradient_is_that_of_the_mean_over_real_rows() -> None:
    """d/dw of mean((w x)^2) over x = 1, 3 is (2 w + 18 w) / 2 = 10 w; the masked row x = 100 does not exist."""
    w = nn.Parameter(torch.tensor(2.0))
    values, mask = (w * torch.tensor([1.0, 100.0, 3.0])) ** 2, torch.tensor([1.0, 0.0, 1.0])
    (gradient,) = NoPrivacy().gradients(values, mask, [w])
    assert gradient.item() == 20


def test_a_parameter_that_the_losses_do_not_reach_gets_zeros() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    gradients = NoPrivacy().gradients(used.sum().expand(4), torch.ones(4), [used, unused])
    assert [gradient.tolist() for gradient in gradients] == [[1, 1], [0, 0, 0]]


def test_it_promises_nothing() -> None:
    assert NoPrivacy().guarantee == "no DP guarantee"
