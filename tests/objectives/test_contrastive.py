"""MOON's term: its weight must scale its gradient, and without a past there is none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedloom.engines.optimizers import gradients_of_mean
from fedloom.federation.records import Batch
from fedloom.modalities.likelihoods import Bernoulli
from fedloom.models.gaussian import DiagonalGaussian
from fedloom.models.history import RememberingVAE, remembered
from fedloom.models.networks import Flat
from fedloom.objectives.base import Losses, Step
from fedloom.objectives.contrastive import Contrastive
from fedloom.objectives.elbo import Elbo
from objectives.test_elbo import CONTEXT, batch_of_seven

PLACES, TEMPERATURE = 3, 0.5


def remembering_vae(filled: int) -> RememberingVAE:
    """Its earlier encoders are other ones; ``filled`` of three places count."""
    torch.manual_seed(0)
    model = RememberingVAE(
        Flat((6,), (8,), (6,)), Flat((3,), (8,), (6,)), torch.zeros(2, 3), Bernoulli(), places=PLACES
    )
    for parameter in model.history.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.history.filled[:filled] = 1.0
    return model


def evaluated(model: RememberingVAE, weight: float) -> tuple[Losses, Batch, dict[str, Tensor], dict[str, Tensor]]:
    batch, noise = batch_of_seven()
    generator = torch.Generator().manual_seed(2)
    noise |= {"received": torch.randn(7, 3, generator=generator)}
    noise |= {"earlier": torch.randn(7, PLACES, 3, generator=generator)}
    received = {name: p.detach() + 0.3 for name, p in model.named_parameters()}
    objective = Contrastive(Elbo(3), weight, TEMPERATURE, PLACES)
    assert {name: (7, *shape) for name, shape in objective.noise.items()} == {
        n: tuple(t.shape) for n, t in noise.items()
    }
    return objective(model, Step(batch, noise, received, CONTEXT)), batch, noise, received


def gradients(filled: int, weight: float) -> list[Tensor]:
    model = remembering_vae(filled)
    losses, batch, _, _ = evaluated(model, weight)
    trained = [p for name, p in model.named_parameters() if not name.startswith("history.")]
    return list(gradients_of_mean(losses.total, batch.mask, trained))


def test_the_weight_scales_the_gradient_of_the_term() -> None:
    none, one, three = (gradients(2, weight) for weight in (0.0, 1.0, 3.0))
    changed = [not torch.equal(a, b) for a, b in zip(none, one, strict=True)]
    assert any(changed)
    for a, b, c in zip(none, one, three, strict=True):
        torch.testing.assert_close(c - a, 3 * (b - a), rtol=1e-3, atol=1e-4)


def test_without_a_past_the_term_is_zero_and_so_is_its_gradient() -> None:
    losses, *_ = evaluated(remembering_vae(0), 2.0)
    assert losses.terms["contrast"].tolist() == [0.0] * 7
    assert all(torch.equal(a, b) for a, b in zip(gradients(0, 0.0), gradients(0, 2.0), strict=True))


@pytest.mark.parametrize("filled", [1, 3])
def test_against_the_formula(filled: int) -> None:
    model = remembering_vae(filled)
    losses, batch, noise, received = evaluated(model, 2.0)

    def cosine(a: Tensor, b: Tensor) -> float:
        return float((a @ b) / (a.norm() * b.norm()))

    with torch.no_grad():
        z = DiagonalGaussian.of(model.encoder(batch.x)).sample(noise["z1"])
        past = [
            DiagonalGaussian.of(encoder(batch.x)).sample(noise["earlier"][:, i])
            for i, encoder in enumerate(model.history.encoders)
        ]
        model.load_state_dict({**model.state_dict(), **{n: t for n, t in received.items() if n.startswith("encoder.")}})
        served = DiagonalGaussian.of(model.encoder(batch.x)).sample(noise["received"])
    for row in range(7):
        towards = math.exp(cosine(z[row], served[row]) / TEMPERATURE)
        away = sum(math.exp(cosine(z[row], past[i][row]) / TEMPERATURE) for i in range(filled))
        expected = -math.log(towards / (towards + away))
        assert losses.terms["contrast"][row].item() == pytest.approx(expected, rel=1e-4)
        whole = losses.terms["nll"][row] + losses.terms["kl"][row] + 2.0 * expected
        assert losses.total[row].item() == pytest.approx(whole.item(), rel=1e-4)


def test_the_past_moves_by_one_place_and_the_oldest_is_forgotten() -> None:
    before = {name: tensor.clone() for name, tensor in remembering_vae(2).state_dict().items()}
    after = remembered(before)
    assert after.keys() == before.keys()
    assert after["history.filled"].tolist() == [1.0, 1.0, 1.0]
    for name in (n.removeprefix("encoder.") for n in before if n.startswith("encoder.")):
        assert torch.equal(after[f"history.encoders.0.{name}"], before[f"encoder.{name}"])
        assert torch.equal(after[f"history.encoders.1.{name}"], before[f"history.encoders.0.{name}"])
        assert torch.equal(after[f"history.encoders.2.{name}"], before[f"history.encoders.1.{name}"])
        assert torch.equal(after[f"encoder.{name}"], before[f"encoder.{name}"])
