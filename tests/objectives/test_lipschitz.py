from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from fedloom.errors import ConfigError
from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext
from fedloom.modalities.likelihoods import Normal
from fedloom.models.networks import Flat
from fedloom.models.vae import VAE
from fedloom.objectives.base import Step
from fedloom.objectives.elbo import Elbo
from fedloom.objectives.lending import Lending
from fedloom.objectives.lipschitz import AlignPenalty, JacobianPenalty, WithPenalty, stretches
from fedloom.privacy.lipschitz import bounded_decoder
from fedloom.privacy.separation import require_separate_examples

ROUND = RoundContext(1, 1, (0,))


def model() -> VAE:
    torch.manual_seed(0)
    return VAE(Flat((5,), (6,), (4,)), Flat((2,), (6,), (5,)), torch.zeros(1, 2), Normal())


def batch(rows: int = 4) -> Batch:
    x = torch.rand(rows, 5, generator=torch.Generator().manual_seed(1))
    return Batch(x, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64), torch.ones(rows))


def noise_for(objective: WithPenalty, rows: int = 4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {name: torch.randn(rows, *shape, generator=draw) for name, shape in objective.noise.items()}


def test_power_iteration_finds_the_largest_singular_value() -> None:
    decoder, z = Flat((3,), (8,), (7,)), torch.randn(6, 3)
    jacobians = vmap(jacrev(lambda point: decoder(point.unsqueeze(0)).flatten()))(z)
    exact = torch.linalg.matrix_norm(jacobians, 2)
    found = stretches(decoder, z, torch.randn(6, 3), iterations=60)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-6)
    assert (stretches(decoder, z, torch.randn(6, 3), iterations=1) <= exact * 1.0001).all()


@pytest.mark.parametrize(("limit", "active"), [(1e-3, True), (1e3, False)])
def test_only_steep_decoders_are_penalised_and_only_decoders(limit: float, active: bool) -> None:
    vae, data, base = model(), batch(), Elbo(2)
    objective = WithPenalty(base, JacobianPenalty(limit), 2.0)
    noise = noise_for(objective)
    losses = objective(vae, Step(data, noise, {}, ROUND))
    penalty = losses.terms["jacobian"]
    torch.testing.assert_close(losses.total, base(vae, Step(data, noise, {}, ROUND)).total + 2.0 * penalty)
    assert (penalty > 0).all() == active
    gradients = torch.autograd.grad(penalty.sum(), list(vae.parameters()), allow_unused=True, materialize_grads=True)
    reached = {name for (name, _), gradient in zip(vae.named_parameters(), gradients, strict=True) if gradient.any()}
    assert {name.split(".")[0] for name in reached} == ({"decoder"} if active else set())


def test_training_on_the_penalty_makes_a_decoder_flat() -> None:
    vae, data = model(), batch(16)
    objective = WithPenalty(Elbo(2), JacobianPenalty(0.05), 1.0)
    noise = noise_for(objective, 16)
    optimizer = torch.optim.Adam(vae.decoder.parameters(), lr=0.01)
    before = objective(vae, Step(data, noise, {}, ROUND)).terms["jacobian"].mean().item()
    for _ in range(60):
        optimizer.zero_grad()
        objective(vae, Step(data, noise, {}, ROUND)).terms["jacobian"].sum().backward()
        optimizer.step()
    assert objective(vae, Step(data, noise, {}, ROUND)).terms["jacobian"].mean().item() < 0.01 * before


class Opposite(nn.Module):
    """Two pixels that move in opposite directions, as steeply as one likes: their sum stands still."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.stack((z[:, 0], -z[:, 0]), dim=1) * 50


class Plain(Normal):
    def mean(self, output: Tensor) -> Tensor:
        return output


def test_the_papers_penalty_does_not_see_a_steep_decoder_whose_pixels_cancel() -> None:
    """|J^T 1| = 0 everywhere: the penalty is (sqrt(1e-7) - 1)^2 and asks for more steepness; ours is (70.7 - 1)^2."""
    vae = VAE(Flat((2,), (6,), (4,)), Opposite(), torch.zeros(1, 2), Plain())
    data = Batch(torch.rand(4, 2), *[torch.zeros(4, dtype=torch.int64)] * 2, torch.ones(4))
    paper, ours = (WithPenalty(Elbo(2), penalty, 1.0) for penalty in (AlignPenalty(), JacobianPenalty()))
    theirs = paper(vae, Step(data, noise_for(paper), {}, ROUND)).terms["align-penalty"]
    torch.testing.assert_close(theirs, torch.full((4,), (1e-7**0.5 - 1) ** 2))
    found = ours(vae, Step(data, noise_for(ours), {}, ROUND)).terms["jacobian"]
    torch.testing.assert_close(found, torch.full((4,), (50 * 2**0.5 - 1) ** 2))


def test_the_papers_penalty_is_that_of_its_equation() -> None:
    vae, data, objective = model(), batch(), WithPenalty(Elbo(2), AlignPenalty(), 3.0)
    noise = noise_for(objective)
    losses = objective(vae, Step(data, noise, {}, ROUND))
    z = vae.encode(data.x, data.group).sample(noise["penalty"])
    share = torch.distributions.Normal(0, 1).cdf(noise["between"])
    between = share * z + (1 - share) * z[noise["order"][:, 0].argsort()]
    jacobians = vmap(jacrev(lambda point: torch.sigmoid(vae.decoder(point.unsqueeze(0))).flatten()))(between)
    expected = ((jacobians.sum(dim=1).square().sum(dim=1) + 1e-7).sqrt() - 1).square()
    torch.testing.assert_close(losses.terms["align-penalty"], expected)
    torch.testing.assert_close(losses.total, Elbo(2)(vae, Step(data, noise, {}, ROUND)).total + 3.0 * expected)


@pytest.mark.parametrize("bounded", [False, True])
def test_the_gradient_of_each_example_is_what_it_is_alone(bounded: bool) -> None:
    """Under DP-SGD the written-out path takes the penalty and layers that are scaled down; rows by themselves agree."""
    vae, data, objective = model(), batch(), WithPenalty(Elbo(2), JacobianPenalty(1e-3), 2.0)
    if bounded:
        vae.decoder = bounded_decoder(vae.decoder, 0.01)
    noise, parameters = noise_for(objective), dict(vae.named_parameters())
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    together = Lending(vae, objective).gradients(weights, {}, Step(data, noise, {}, ROUND))
    for row in range(4):
        one = Batch(*(column[row : row + 1] for column in (data.x, data.y, data.group, data.mask)))
        own = {name: n[row : row + 1] for name, n in noise.items()}
        value = objective(vae, Step(one, own, {}, ROUND)).total
        alone = torch.autograd.grad(value.sum(), list(parameters.values()))
        for name, gradient in zip(parameters, alone, strict=True):
            torch.testing.assert_close(together[name][row], gradient, rtol=1e-3, atol=1e-5)


def test_under_dp_sgd_the_papers_penalty_is_refused_and_ours_is_not() -> None:
    vae, data = model(), batch()

    def losses(objective: WithPenalty, x: Tensor) -> Tensor:
        moved = Batch(x, data.y, data.group, data.mask)
        return objective(vae, Step(moved, noise_for(objective), {}, ROUND)).total

    paper, ours = (WithPenalty(Elbo(2), penalty, 1.0) for penalty in (AlignPenalty(), JacobianPenalty()))
    require_separate_examples(lambda x: losses(ours, x), data.x, ours.name, "")
    with pytest.raises(ConfigError, match=r"'align-penalty' mixes examples.*use the penalty 'jacobian'"):
        require_separate_examples(lambda x: losses(paper, x), data.x, paper.name, "the penalty 'jacobian'")
