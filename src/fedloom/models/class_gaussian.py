"""A normal distribution for each class, with one covariance for all: the plainest generator of labelled vectors.

It can be learned from a few noisy sums. What is done to them here looks at nothing but the sums themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.federation.records import Batch
from fedloom.outline import in_outline

BIAS = 0.1  # the constant that stands for a bias beside a vector of length 1
SMALLEST = 1e-6  # of the trace: the least variance along any direction


class ClassGaussian(nn.Module):
    """Block ``decoder``: x = centre + offsets[y] + factor e, for e ~ N(0, I)."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        shapes = {
            "centre": (width,),
            "offsets": (classes, width),
            "factor": (width, width),
            # What is passed on while offsets are learned: the covariance of all records, a linear classifier, the mean
            # of its weights over so many rounds, and the metric that its steps are taken in.
            "covariance": (width, width),
            "weights": (classes, width),
            "bias": (classes,),
            "mean": (classes, width),
            "averaged": (1,),
            "metric": (width, width),
        }
        tensors = {name: nn.Parameter(torch.zeros(shape), requires_grad=False) for name, shape in shapes.items()}
        self.decoder = nn.ParameterDict(tensors)

    def generate(self, noise: Tensor, label: Tensor) -> Tensor:
        """One vector for each label."""
        decoder = self.decoder
        found: Tensor = decoder["centre"] + decoder["offsets"][label] + noise @ decoder["factor"].T
        return found


@dataclass(frozen=True)
class Contribution:
    """What a record adds to the moments: z e_y, z z^T and e_y, for z = (x - centre) / radius, |z| at most 1.

    The whole matrix z z^T is sent, not a half: it costs nothing more, and what is not symmetric of the sum is noise
    alone, which tells the server how much of it there is.
    """

    classes: int
    radius: float = 1.0
    product_weight: float = 1.0
    count_weight: float = 0.2

    @property
    def bound(self) -> float:
        """The largest norm of all that a record contributes."""
        return math.sqrt(1.0 + self.product_weight**2 + self.count_weight**2)

    def shapes(self, width: int) -> Mapping[str, tuple[int, ...]]:
        """Of the sums, for records of a width."""
        return {"sums": (self.classes, width), "products": (width, width), "counts": (self.classes,)}

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """One row for each record."""
        assert isinstance(model, ClassGaussian)
        z = within_unit_ball((batch.x - model.decoder["centre"]) / self.radius)
        label = functional.one_hot(batch.y, self.classes).to(z.dtype)
        return {
            "sums": label.unsqueeze(2) * z.unsqueeze(1),
            "products": self.product_weight * z.unsqueeze(2) * z.unsqueeze(1),
            "counts": self.count_weight * label,
        }


@dataclass(frozen=True)
class Itself:
    """The record itself, cut to length 1."""

    def __call__(self, _: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """One row for each record."""
        return {"sum": within_unit_ball(batch.x)}


@dataclass(frozen=True)
class Gradient:
    """What a record adds to the gradient of -log p(y|x), for z = (x - centre) / radius and a constant beside it."""

    classes: int
    radius: float

    def __call__(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """One row for each record."""
        assert isinstance(model, ClassGaussian)
        decoder = model.decoder
        z = within_unit_ball((batch.x - decoder["centre"]) / self.radius)
        logits = self.radius * z @ decoder["weights"].T + decoder["bias"]
        excess = logits.softmax(dim=1) - functional.one_hot(batch.y, self.classes).to(z.dtype)
        return {"weights": excess.unsqueeze(2) * z.unsqueeze(1), "bias": BIAS * excess}


def within_unit_ball(z: Tensor) -> Tensor:
    """Rows longer than 1 cut to length 1."""
    lengths: Tensor = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return z / lengths.clamp_min(1.0)


@dataclass(frozen=True, eq=False)
class Estimate:
    """What noisy moments say, in float64."""

    __repr__ = in_outline

    centre: Tensor
    offsets: Tensor  # (classes, width), without the directions in which noise is larger than they can be
    covariance: Tensor  # of all records
    within: Tensor  # of the records of a class
    metric: Tensor  # inverse of the covariance of all records, none of its eigenvalues below the noise
    weights: Tensor  # of the linear classifier in that metric
    bias: Tensor
    shares: Tensor  # of the classes

    def about(self, centre: Tensor) -> Estimate:
        """The same distributions and the same classifier, told from another centre."""
        moved = self.centre - centre
        return replace(self, centre=centre, offsets=self.offsets + moved, bias=self.bias - self.weights @ moved)


def estimate(sums: Mapping[str, Tensor], records: float, centre: Tensor, how: Contribution) -> Estimate:
    """From sums over ``records`` records, a public number.

    Eigenvalues of a symmetric matrix of normal noise stay below an edge. Those of the noisy covariance above it are
    shrunk by what noise adds to them (Benaych-Georges, Nadakuditi 2011); below it nothing can be told apart, so what
    is left of the trace is spread evenly there, and offsets are shrunk there by what is left over the edge.
    """
    first, products, counts = (sums[name].to(torch.float64) for name in ("sums", "products", "counts"))
    width = products.shape[0]
    odd = (products - products.T)[torch.triu(torch.ones_like(products), 1) > 0] / math.sqrt(2.0)
    noise = odd.square().mean().sqrt()  # standard deviation of every number that was sent
    shares = _class_shares(counts / how.count_weight, noise / how.count_weight, records)
    scale, mean = how.radius, first.sum(dim=0) / records
    second = (products + products.T) / (2.0 * how.product_weight * records)
    values, vectors = _eigen(second - mean.outer(mean))
    entry = noise / (how.product_weight * records * math.sqrt(2.0))
    edge = 2.0 * entry * math.sqrt(width)
    mean_noise = width * len(counts) * (noise / records) ** 2
    trace = (second.trace() - (mean.square().sum() - mean_noise).clamp_min(0.0)).clamp(SMALLEST, 1.0)
    seen = values > edge
    strong = torch.where(seen, (values + (values.square() - edge.square()).clamp_min(0.0).sqrt()) / 2.0, 0.0)
    rest = (trace - strong.sum()).clamp_min(0.02 * trace) / (~seen).sum().clamp_min(1)
    kept = torch.where(seen, strong, rest).clamp_min(SMALLEST * trace)
    cautious = torch.maximum(values, torch.maximum(edge, SMALLEST * trace))
    away = first / (records * shares).unsqueeze(1) - mean
    offsets = (away @ vectors * (kept / cautious)) @ vectors.T
    metric = (vectors / cautious) @ vectors.T
    weights = away @ metric
    between = torch.einsum("c,ci,cj->ij", shares, offsets, offsets)
    covariance = (vectors * kept) @ vectors.T
    within = _floored(covariance - between, (SMALLEST * trace).item())
    return Estimate(
        centre=centre.to(torch.float64) + scale * mean,
        offsets=scale * offsets,
        covariance=scale**2 * covariance,
        within=scale**2 * within,
        metric=metric / scale**2,
        weights=weights / scale,
        bias=-0.5 * (weights * away).sum(dim=1),
        shares=shares,
    )


def _class_shares(counts: Tensor, noise: Tensor, records: float) -> Tensor:
    """The shares of the classes: noisy counts drawn towards equal ones by as much as noise makes them differ."""
    equal = records / len(counts)
    spread = (counts - equal).square().mean()
    signal = (spread - noise.square()).clamp_min(0.0)
    drawn = equal + (counts - equal) * (signal / (signal + noise.square()).clamp_min(1e-12))
    positive = drawn.clamp_min(0.05 * equal if noise > 0 else 1e-3)
    return positive / positive.sum()


def _floored(matrix: Tensor, least: float) -> Tensor:
    values, vectors = _eigen(matrix)
    return (vectors * values.clamp_min(least)) @ vectors.T


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, rising, and eigenvectors as columns."""
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors


def told_apart_by(weights: Tensor, covariance: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets and covariance of classes that these weights tell apart best, with ``covariance`` as large in all.

    Within classes it is c times the covariance, and offsets are that times the weights; c makes up for what the
    offsets themselves add to the trace. A vector that all weights have in common tells nothing apart; it is chosen so
    that offsets, as frequent as ``shares`` say, are 0 in the mean.
    """
    reach = (weights - shares @ weights) @ covariance
    added = (shares @ reach.square().sum(dim=1) / covariance.trace()).clamp_min(1e-12)
    c = (torch.sqrt(1.0 + 4.0 * added) - 1.0) / (2.0 * added)
    return c * reach, c * covariance


def square_root(covariance: Tensor) -> Tensor:
    """A matrix whose product with its own transpose is the covariance."""
    values, vectors = _eigen(covariance)
    return vectors * values.clamp_min(0.0).sqrt()
