"""Where a server samples: inside a ball, from a mixture, by a histogram."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedloom.config import ServerConfig
from fedloom.errors import ConfigError
from fedloom.federation.records import Records, batch_of
from fedloom.methods.latents import DRAWS, Draw, FitMixture, NearestPoint, nearest, points, release
from fedloom.modalities.likelihoods import Bernoulli
from fedloom.models.vae import VAE
from fedloom.privacy.noise import NoiseKey
from fedloom.privacy.payload_sums import Query
from fedloom.sharing.plan import Tensors
from fedloom.streams import Streams

ROWS, LATENT, STREAMS = 500, 2, Streams(3)


def normal(name: str, width: int, attempt: int) -> Tensor:
    return STREAMS.normal(f"{name}/{attempt}", ROWS, width)


def drawn(sent: Tensors | None = None, **settings: float) -> Draw:
    return Draw(normal, ServerConfig(**settings), sent or {}, STREAMS)  # type: ignore[arg-type]


def test_a_ball_keeps_what_lies_inside_and_draws_the_rest_again() -> None:
    z, first = DRAWS["ball"](drawn(radius=1.5), LATENT), normal("z1", LATENT, 0)
    inside = first.norm(dim=1) <= 1.5
    assert 0 < inside.sum() < ROWS
    assert z.norm(dim=1).max() <= 1.5
    assert torch.equal(z[inside], first[inside])


def test_a_ball_that_holds_next_to_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server.radius = 1e-06 is too small for 2 latents"):
        DRAWS["ball"](drawn(radius=1e-6), LATENT)


def test_a_mixture_gives_its_components_by_weight() -> None:
    means = torch.tensor([[10.0, 0.0], [0.0, 20.0], [99.0, 99.0]])
    sent = {"weights": torch.tensor([0.25, 0.75, 0.0]), "means": means, "variances": torch.full((3, 2), 0.04)}
    z = DRAWS["mixture"](drawn(sent), LATENT)
    component = torch.cdist(z, means).argmin(dim=1)
    assert torch.bincount(component, minlength=3).tolist() == pytest.approx([125, 375, 0], abs=30)
    deviations = z - means[component]
    torch.testing.assert_close(deviations, 0.2 * normal("z1", LATENT, 0), rtol=1e-3, atol=1e-3)


def test_a_histogram_gives_each_point_its_share() -> None:
    places = points(6, LATENT, STREAMS)
    # What noise has made negative counts as nobody.
    sent = {"counts": torch.tensor([30.0, 0.0, 10.0, -5.0, 0.0, 60.0])}
    z = DRAWS["histogram"](drawn(sent, components=6), LATENT)
    share = torch.bincount(nearest(z, places), minlength=6) / ROWS
    assert share.tolist() == pytest.approx([0.3, 0, 0.1, 0, 0, 0.6], abs=0.05)


def test_a_histogram_of_nothing_is_the_prior() -> None:
    z = DRAWS["histogram"](drawn({"counts": torch.full((6,), -1.0)}, components=6), LATENT)
    assert z.mean(dim=0).tolist() == pytest.approx([0.0, 0.0], abs=0.15)
    assert z.std(dim=0).tolist() == pytest.approx([1.0, 1.0], abs=0.15)


class Identity(torch.nn.Module):
    """Encodes two numbers as their own mean."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.zeros_like(x)], dim=1)


def model_and_records() -> tuple[VAE, Records]:
    """The latent of each record is the record itself, counted from its group's prior mean: 0 or 5."""
    group = torch.arange(40) % 2
    around = torch.where((torch.arange(40) < 30).unsqueeze(1), torch.tensor([2.0, 0.0]), torch.tensor([-2.0, 0.0]))
    x = around + 0.1 * STREAMS.normal("records", 40, 2) + 5.0 * group.unsqueeze(1)
    means = torch.tensor([[0.0, 0.0], [5.0, 5.0]])
    return VAE(Identity(), Identity(), means, Bernoulli()), Records(x, torch.zeros(40, dtype=torch.int64), group)


def test_a_silos_mixture_finds_its_clusters() -> None:
    model, records = model_and_records()
    fitted = FitMixture(2)(Query(records, model, STREAMS, NoiseKey(0, 1, 0), None))
    order = fitted["weights"].argsort()
    torch.testing.assert_close(fitted["weights"][order], torch.tensor([0.25, 0.75]), rtol=0, atol=1e-3)
    torch.testing.assert_close(fitted["means"][order], torch.tensor([[-2.0, 0.0], [2.0, 0.0]]), rtol=0, atol=0.15)


def test_a_silo_with_fewer_records_than_components_sends_what_is_declared() -> None:
    model, records = model_and_records()
    fitted = FitMixture(3)(Query(records.take(torch.tensor([0])), model, STREAMS, NoiseKey(0, 1, 0), None))
    sent = release(ServerConfig(latents="mixture", components=3), LATENT, STREAMS)
    assert sent is not None
    assert {name: tuple(tensor.shape) for name, tensor in fitted.items()} == sent.payload.shapes
    assert fitted["weights"].tolist() == [1.0, 0.0, 0.0]


def test_a_records_contribution_to_the_histogram_is_one_at_one_place() -> None:
    model, records = model_and_records()
    places = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [50.0, 50.0]])
    rows = NearestPoint(places)(model, batch_of(records, torch.arange(40)))["counts"]
    assert rows.norm(dim=1).tolist() == [1.0] * 40
    assert rows.sum(dim=0).tolist() == [30.0, 10.0, 0.0]


def test_only_the_mixture_is_without_a_guarantee() -> None:
    sent = {
        latents: found
        for latents in ("prior", "ball", "mixture", "histogram")
        if (found := release(ServerConfig(latents=latents), LATENT, STREAMS)) is not None  # type: ignore[arg-type]
    }
    problems = {latents: found.statistic.problem for latents, found in sent.items()}
    assert problems.keys() == {"mixture", "histogram"}
    assert "no DP guarantee" in problems["mixture"]
    assert problems["histogram"] == ""
    assert sent["histogram"].payload.cost.endswith("under a privacy mechanism, else exact")
