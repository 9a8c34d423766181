"""Several draws of time and noise for a record are parts of one gradient: less variance, and privacy as before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedloom.experiment import Experiment
from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext
from fedloom.models.unet import Embedding, FlowUNet, Middle, UNetSize, WayDown, WayUp
from fedloom.objectives.base import Step
from fedloom.objectives.lending import Lending
from fedloom.objectives.rectified_flow import RectifiedFlow
from fedloom.privacy.dp_sgd import DPSGD
from fedloom.privacy.gradient_forms import Whole
from labelled_images import picture_config, picture_federation

SHAPE, CONTEXT = (1, 4, 4), RoundContext(1, 4, (0,))
ONE = RectifiedFlow(SHAPE)


def network() -> FlowUNet:
    """Weights at which nothing is zero."""
    torch.manual_seed(0)
    size = UNetSize((4,), 1, 0, 0.0)
    model = FlowUNet(Embedding(size, 0, 0), WayDown(1, size), Middle(size), WayUp(1, size))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def gradients(objective: RectifiedFlow, x: Tensor, noise: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of each record's loss, (rows, *shape)."""
    model, nobody = network(), torch.zeros(len(x), dtype=torch.int64)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    step = Step(Batch(x, nobody, nobody, torch.ones(len(x))), noise, {}, CONTEXT)
    return Lending(model, objective).gradients(weights, {}, step)


def drawn(objective: RectifiedFlow, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, *shape, generator=generator) for name, shape in objective.noise.items()}


def flat(rows: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten(1) for part in rows.values()], dim=1).double()


def test_the_gradient_of_several_draws_is_the_mean_of_theirs() -> None:
    several = replace(ONE, draws=3)
    x, noise = torch.rand(5, *SHAPE), drawn(several, 5)
    apart = [flat(gradients(ONE, x, {name: t[:, i : i + 1] for name, t in noise.items()})) for i in range(3)]
    torch.testing.assert_close(flat(gradients(several, x, noise)), sum(apart) / 3, rtol=1e-4, atol=1e-4)


def test_the_variance_of_a_records_gradient_falls_as_one_over_the_draws() -> None:
    """Of independent draws of one record: Var(mean of K) = Var / K, and the mean itself stays."""
    record, rows = torch.rand(1, *SHAPE), 1200
    found = {}
    for draws in (1, 4):
        objective = replace(ONE, draws=draws)
        each = flat(gradients(objective, record.expand(rows, *SHAPE), drawn(objective, rows)))
        found[draws] = each.mean(dim=0), each.var(dim=0).sum().item()
    assert found[4][1] == pytest.approx(found[1][1] / 4, rel=0.1)
    off = (found[4][0] - found[1][0]).square().sum().item()
    assert off < 3 * (found[1][1] + found[4][1]) / rows  # as far as means of so many rows are apart by chance


@pytest.mark.parametrize("draws", [1, 8])
def test_one_record_moves_the_sum_by_the_clip_bound_whatever_the_draws(draws: int) -> None:
    """The sensitivity, met exactly by a record that is longer than the bound, as all of these are."""
    objective, bound, rows = replace(ONE, draws=draws), torch.tensor(0.5), 6
    forms = {
        name: Whole(part)
        for name, part in gradients(objective, torch.rand(rows, *SHAPE), drawn(objective, rows)).items()
    }
    mechanism = DPSGD(1.0, rate=0.5, expected=1.0)
    with_it, without = (
        mechanism.clip(forms, mask, bound).gradients for mask in (torch.ones(rows), torch.eye(rows)[0].neg() + 1)
    )
    moved = torch.cat([(with_it[name] - without[name]).flatten() for name in with_it]).norm()
    torch.testing.assert_close(moved, bound, rtol=1e-4, atol=0.0)


def test_a_silo_pays_the_same_for_one_draw_and_for_many() -> None:
    private = (
        "privacy.mechanism=dp-sgd",
        "privacy.epsilon=3",
        "privacy.delta=1e-3",
        "privacy.accountant=rdp",
        "privacy.noise=test",
    )
    one, many = (
        Experiment.of(
            picture_config("fission_flow", *private, "method.widths=[4, 8]", f"method.draws={draws}"),
            picture_federation(),
        ).trainer.privacy
        for draws in (1, 16)
    )
    assert one == many
    assert one[0].rounds
