"""From where in their latent space a server samples the decoders of its silos.

``prior``      N(0, I), as the model assumes; costs nothing.
``ball``       N(0, I) inside a ball, as theorem A.5 of ALIGN-FL (Gulati, Gross, Wunder, 2025, arXiv 2512.13316) asks.
``mixture``    a Gaussian mixture that each silo fits to its own latents, as ALIGN-FL's published code does. The mixture
               describes private records, and nothing covers that: no DP guarantee.
``histogram``  N(0, I), weighted by how many records of the silo have their latent nearest to each of a few public
               points. One sum of bounded contributions, so it can be sent with noise that is accounted for.

All latents are counted from the prior mean of their group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.config import ServerConfig
from fedloom.errors import ConfigError, MissingExtraError
from fedloom.federation.records import Batch
from fedloom.methods.base import PayloadRule
from fedloom.models.vae import VAE
from fedloom.outline import in_outline
from fedloom.privacy.payload_sums import BoundedSum, Query, Unbounded
from fedloom.sharing.plan import Payload, Tensors, payload_of_sums
from fedloom.streams import Streams

PAYLOAD = "latents"
MOST_ATTEMPTS = 200
CANDIDATES = 16  # for each latent that a histogram gives

Normal = Callable[[str, int, int], Tensor]  # (name, width, attempt) -> standard normal rows of a chunk


@dataclass(frozen=True)
class Draw:
    """What it takes to draw latents for one chunk of samples of one silo."""

    __repr__ = in_outline

    normal: Normal
    settings: ServerConfig
    sent: Tensors  # the silo's payload
    streams: Streams

    def uniform(self, name: str) -> Tensor:
        """One number in (0, 1) for each row."""
        numbers: Tensor = torch.special.ndtr(self.normal(name, 1, 0))
        return numbers.squeeze(1)


def from_ball(draw: Draw, latent: int) -> Tensor:
    """Those outside the ball are drawn again."""
    z = draw.normal("z1", latent, 0)
    for attempt in range(1, MOST_ATTEMPTS):
        outside = z.norm(dim=1, keepdim=True) > draw.settings.radius
        if not outside.any():
            return z
        z = torch.where(outside, draw.normal("z1", latent, attempt), z)
    raise ConfigError(
        f"server.radius = {draw.settings.radius:g} is too small for {latent} latents: "
        "hardly a draw from N(0, I) lies inside"
    )


def from_mixture(draw: Draw, latent: int) -> Tensor:
    """A component by its weight, then a point of it."""
    which = _chosen(draw.sent["weights"], draw.uniform("component"))
    noise = draw.normal("z1", latent, 0)
    return draw.sent["means"][which] + draw.sent["variances"].sqrt()[which] * noise


def from_histogram(draw: Draw, latent: int) -> Tensor:
    """Many candidates from N(0, I), of which some are kept: each point's share is that of the records near it."""
    noise = draw.normal("candidates", CANDIDATES * latent, 0)
    candidates = noise.reshape(-1, latent)
    cells = nearest(candidates, points(draw.settings.components, latent, draw.streams).to(noise.device))
    counts = draw.sent["counts"].clamp_min(0.0)
    available = torch.bincount(cells, minlength=len(counts)).to(counts.dtype)
    shares = torch.where(available > 0, counts / available.clamp_min(1.0), 0.0)
    if not shares.any():  # nothing but noise arrived
        shares = torch.ones_like(shares)
    return candidates[_chosen(shares[cells], draw.uniform("component"))]


def _chosen(weights: Tensor, uniform: Tensor) -> Tensor:
    """An index for each row, with probability in proportion to its weight."""
    edges = weights.to(torch.float64).cumsum(0)
    return torch.searchsorted(edges, uniform.to(torch.float64) * edges[-1]).clamp_max(len(weights) - 1)


def points(count: int, latent: int, streams: Streams) -> Tensor:
    """Public points that are spread as the prior."""
    return streams.normal("distil/points", count, latent)


def nearest(z: Tensor, centres: Tensor) -> Tensor:
    """The number of the point that is nearest to each row."""
    return torch.cdist(z, centres).argmin(dim=1)


DRAWS: dict[str, Callable[[Draw, int], Tensor]] = {
    "ball": from_ball,
    "mixture": from_mixture,
    "histogram": from_histogram,
}


def _codes(model: nn.Module, x: Tensor, group: Tensor) -> Tensor:
    assert isinstance(model, VAE)
    return model.encode(x, group).mean - model.prior_mean(group)


@dataclass(frozen=True)
class FitMixture:
    """A mixture of diagonal Gaussians over a silo's latents."""

    components: int

    def __call__(self, query: Query) -> Tensors:
        """Weights, means and variances."""
        try:
            from sklearn.mixture import GaussianMixture
        except ImportError as error:
            raise MissingExtraError(
                "server.latents = 'mixture' needs the package 'scikit-learn'; install it with: "
                "pip install 'fedloom[eval]'"
            ) from error
        with torch.no_grad():
            codes = _codes(query.model, query.records.values, query.records.group).cpu()
        count = min(self.components, len(codes))
        codes = codes.expand(2, -1) if len(codes) == 1 else codes  # no mixture is fitted to a single record
        seed = query.streams.torch_seed("distil/mixture", silo=query.noise_key.silo) % 2**32
        fitted = GaussianMixture(count, covariance_type="diag", random_state=seed).fit(codes.double().numpy())
        found = {"weights": fitted.weights_, "means": fitted.means_, "variances": fitted.covariances_}
        tensors = {name: torch.from_numpy(value).to(torch.float32) for name, value in found.items()}
        missing = self.components - count  # a silo with fewer records than components
        return {
            name: functional.pad(t, (0, missing) if t.dim() == 1 else (0, 0, 0, missing)) for name, t in tensors.items()
        }


@dataclass(frozen=True)
class NearestPoint:
    """A record's contribution to the histogram: 1 for the public point that is nearest to its latent."""

    __repr__ = in_outline

    centres: Tensor

    def __call__(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """One row for each record."""
        cells = nearest(_codes(model, batch.x, batch.group), self.centres.to(batch.x.device))
        return {"counts": functional.one_hot(cells, len(self.centres)).to(torch.float32)}


def release(settings: ServerConfig, latent: int, streams: Streams) -> PayloadRule | None:
    """What the silos have to send for the way in which the server samples."""
    count = settings.components
    if settings.latents == "mixture":
        shapes = {"weights": (count,), "means": (count, latent), "variances": (count, latent)}
        cost = "no DP guarantee: a mixture fitted to the latents of private records"
        return PayloadRule(Payload(PAYLOAD, cost, shapes), Unbounded(FitMixture(count), cost), when="every")
    if settings.latents == "histogram":
        what = "how many records lie nearest to each of a few public points"
        statistic = BoundedSum(NearestPoint(points(count, latent, streams)), bound=1.0)
        return PayloadRule(payload_of_sums(PAYLOAD, what, {"counts": (count,)}), statistic, when="every")
    return None
