from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, distributions, nn

from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext
from fedloom.modalities.likelihoods import Bernoulli
from fedloom.models.networks import Flat
from fedloom.models.vae import HierarchicalVAE
from fedloom.objectives.base import Losses, Step
from fedloom.objectives.hierarchical_elbo import HierarchicalElbo

CONTEXT = RoundContext(1, 1, (0,))
ROWS = 200_000

# One dimension throughout: q(z1|x) = N(A x, S1), q(z2|z1) = N(C z1, S2), p(z1|z2) = N(D z2, T), p(x|z1) = N(W z1, V).
A, S1, C, S2, D, T, W, V, X, M = 0.8, 0.3, 0.6, 0.5, 0.9, 0.7, 1.2, 0.4, 1.5, -1.0
M1 = A * X


class Line(nn.Module):
    """Mean = slope * input, with a fixed log variance beside it if a variance is given."""

    def __init__(self, slope: float, variance: float | None = None) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))
        self.variance = variance

    def forward(self, x: Tensor) -> Tensor:
        mean = self.slope * x
        return mean if self.variance is None else torch.cat([mean, torch.full_like(mean, math.log(self.variance))], 1)


class Normal:
    def negative_log(self, x: Tensor, output: Tensor) -> Tensor:
        return -distributions.Normal(output, math.sqrt(V)).log_prob(x).sum(dim=1)

    def mean(self, output: Tensor) -> Tensor:
        return output


def linear_model() -> HierarchicalVAE:
    return HierarchicalVAE(Line(A, S1), Line(W), Line(C, S2), Line(D, T), torch.tensor([[M]]), Normal())


def many_draws(objective: HierarchicalElbo) -> Losses:
    generator = torch.Generator().manual_seed(3)
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    noise = {name: torch.randn(ROWS, *shape, generator=generator) for name, shape in objective.noise.items()}
    with torch.no_grad():
        batch = Batch(torch.full((ROWS, 1), X), zeros, zeros, torch.ones(ROWS))
        return objective(linear_model(), Step(batch, noise, {}, CONTEXT))


def gaussian_nll(variance: float, expected_square: float) -> float:
    return 0.5 * (math.log(2 * math.pi * variance) + expected_square / variance)


# Where each expectation comes from: z1 ~ N(M1, S1); z2 ~ N(C M1, C^2 S1 + S2); z1_hat = D z2 + noise of variance T;
# z1 - D z2 has mean (1 - C D) M1 and variance (1 - C D)^2 S1 + D^2 S2.
Z2_VARIANCE = C**2 * S1 + S2
EXPECTED = {
    "nll": gaussian_nll(V, (X - W * M1) ** 2 + W**2 * S1),
    "nll_top": gaussian_nll(V, (X - W * D * C * M1) ** 2 + W**2 * (D**2 * Z2_VARIANCE + T)),
    "kl_top": 0.5 * (S2 + C**2 * (M1**2 + S1) - 1 - math.log(S2)),
    "kl": 0.5 * (S1 + (M1 - M) ** 2 - 1 - math.log(S1)),
    "consistency": 0.5 * (math.log(T / S1) + (S1 + ((1 - C * D) * M1) ** 2 + D**2 * Z2_VARIANCE) / T - 1),
    "sampled": gaussian_nll(T, ((1 - C * D) * M1) ** 2 + (1 - C * D) ** 2 * S1 + D**2 * S2) - gaussian_nll(S1, S1),
}


def test_each_term_has_its_closed_form_as_mean_over_many_draws() -> None:
    losses = many_draws(HierarchicalElbo(1, 1, predefined_prior=True))
    for name, term in losses.terms.items():
        assert term.mean().item() == pytest.approx(EXPECTED[name], abs=4 * term.std().item() / math.sqrt(ROWS) + 1e-5)
    assert losses.total.mean().item() == pytest.approx(sum(EXPECTED[name] for name in losses.terms), abs=0.03)


def test_the_sampled_consistency_is_the_exact_bound_and_the_analytic_one_looser() -> None:
    term = many_draws(HierarchicalElbo(1, 1, predefined_prior=False, consistency="sampled")).terms["consistency"]
    assert term.mean().item() == pytest.approx(EXPECTED["sampled"], abs=4 * term.std().item() / math.sqrt(ROWS))
    evidence = gaussian_nll(W**2 * (D**2 + T) + V, X**2)  # x ~ N(0, W^2 (D^2 + T) + V)
    exact = EXPECTED["nll"] + EXPECTED["kl_top"] + EXPECTED["sampled"]
    analytic = EXPECTED["nll"] + EXPECTED["kl_top"] + EXPECTED["consistency"]
    assert evidence < exact < analytic


@pytest.mark.parametrize(
    ("objective", "terms"),
    [
        (HierarchicalElbo(1, 1, predefined_prior=True), {"nll", "nll_top", "kl_top", "consistency", "kl"}),
        (HierarchicalElbo(1, 1, predefined_prior=False), {"nll", "nll_top", "kl_top", "consistency"}),
        (
            HierarchicalElbo(1, 1, predefined_prior=True, second_reconstruction=False),
            {"nll", "kl_top", "consistency", "kl"},
        ),
    ],
)
def test_switches_drop_exactly_one_term_each(objective: HierarchicalElbo, terms: set[str]) -> None:
    losses = many_draws(objective)
    assert losses.terms.keys() == terms
    assert torch.allclose(losses.total, torch.stack(list(losses.terms.values())).sum(dim=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("term", "reached"),
    [
        ("nll", {"encoder", "decoder"}),
        ("nll_top", {"encoder", "decoder", "top_encoder", "top_decoder"}),
        ("kl_top", {"encoder", "top_encoder"}),
        ("consistency", {"encoder", "top_encoder", "top_decoder"}),
        ("kl", {"encoder"}),
        ("ssim", {"encoder", "decoder"}),
    ],
)
def test_a_terms_gradient_reaches_its_blocks_and_no_other(term: str, reached: set[str]) -> None:
    torch.manual_seed(0)
    shape = (1, 12, 12)
    model = HierarchicalVAE(
        Flat(shape, (8,), (6,)), Flat((3,), (8,), shape), Flat((3,), (8,), (4,)), Flat((2,), (8,), (6,)),
        torch.ones(1, 3), Bernoulli(),
    )  # fmt: skip
    objective = HierarchicalElbo(3, 2, predefined_prior=True, ssim_weight=2.0)
    zeros = torch.zeros(5, dtype=torch.int64)
    noise = {name: torch.randn(5, *size) for name, size in objective.noise.items()}
    losses = objective(model, Step(Batch(torch.rand(5, *shape), zeros, zeros, torch.ones(5)), noise, {}, CONTEXT))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(losses.terms[term].sum(), parameters, allow_unused=True)
    touched = {
        n.partition(".")[0] for n, g in zip(names, gradients, strict=True) if g is not None and g.abs().sum() > 0
    }
    assert touched == reached
