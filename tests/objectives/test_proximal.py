"""FedProx's term: it must change the gradient, and by exactly mu (w - w_received)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedloom.engines.optimizers import gradients_of_mean
from fedloom.objectives.base import Step
from fedloom.objectives.elbo import Elbo
from fedloom.objectives.proximal import Proximal
from objectives.test_elbo import CONTEXT, batch_of_seven, two_group_vae


def gradients(objective: Elbo | Proximal, received: dict[str, Tensor]) -> dict[str, Tensor]:
    model, (batch, noise) = two_group_vae(), batch_of_seven()
    named = dict(model.named_parameters())
    losses = objective(model, Step(batch, noise, received, CONTEXT))
    found = gradients_of_mean(losses.total, batch.mask, list(named.values()))
    return dict(zip(named, found, strict=True))


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_the_gradient_changes_by_mu_times_the_way_from_what_was_received(weight: float) -> None:
    weights = {name: p.detach() for name, p in two_group_vae().named_parameters()}
    received = {name: w - 0.1 * torch.arange(1.0, w.numel() + 1).reshape(w.shape) for name, w in weights.items()}
    plain, held = gradients(Elbo(3), received), gradients(Proximal(Elbo(3), weight), received)
    for name, w in weights.items():
        torch.testing.assert_close(held[name] - plain[name], weight * (w - received[name]), rtol=1e-4, atol=1e-4)


def test_what_was_not_received_is_free() -> None:
    weights = {name: p.detach() for name, p in two_group_vae().named_parameters()}
    received = {name: w - 1.0 for name, w in weights.items() if name.startswith("decoder.")}
    plain, held = gradients(Elbo(3), received), gradients(Proximal(Elbo(3), 1.0), received)
    assert all(torch.equal(held[name], plain[name]) for name in weights if name.startswith("encoder."))
    assert not any(torch.equal(held[name], plain[name]) for name in received)


def test_the_term_is_the_squared_distance_for_every_example() -> None:
    model, (batch, noise) = two_group_vae(), batch_of_seven()
    received = {name: p.detach() - 0.5 for name, p in model.named_parameters()}
    losses = Proximal(Elbo(3), 4.0)(model, Step(batch, noise, received, CONTEXT))
    distance = 0.25 * sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(losses.terms["distance"], torch.full((7,), distance))
    torch.testing.assert_close(losses.total - losses.terms["nll"] - losses.terms["kl"], torch.full((7,), 2 * distance))
