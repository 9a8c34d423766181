"""The Frechet distance between Gaussians fitted to features (Dowson and Landau, 1982), in float64."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.errors import DataError, FedloomWarning
from fedloom.evaluation.metric import FEW, Metric, Reading, Values
from fedloom.evaluation.needs import FEATURES, SAMPLES
from fedloom.outline import in_outline
from fedloom.runs.metrics import metric_key

if TYPE_CHECKING:
    from fedloom.evaluation.evidence import Autoencoder, Evaluation


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and unbiased covariance of features, and from how many of them."""

    __repr__ = in_outline

    mean: Tensor  # (d,) float64
    covariance: Tensor  # (d, d) float64
    count: int

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        """The moments of (n, d) features; two are the least that have a covariance."""
        if len(features) < 2:
            raise DataError(f"a covariance needs at least 2 feature vectors, not {len(features)}")
        if not torch.isfinite(features).all():
            raise DataError("features hold values that are not finite, so they have no mean")
        values = features.to(torch.float64)
        mean = values.mean(dim=0)
        centred = values - mean
        return cls(mean, centred.T @ centred / (len(values) - 1), len(values))

    @cached_property
    def root(self) -> Tensor:
        """A (d, rank) factor R with R R^T = covariance, without the directions whose variance is rounding."""
        try:
            values, vectors = torch.linalg.eigh(self.covariance)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # many equal eigenvalues can keep it from converging
            vectors, values, _ = torch.linalg.svd(self.covariance)  # the same for a covariance, more slowly
        kept = values > len(values) * torch.finfo(torch.float64).eps * values.max().clamp_min(0.0)
        root: Tensor = vectors[:, kept] * values[kept].sqrt()
        return root


def frechet_distance(first: Moments, second: Moments) -> float:
    """The squared 2-Wasserstein distance of the two Gaussians: |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)).

    With C = R R^T the trace of (C1 C2)^(1/2) is the sum of the singular values of R1^T R2: no complex
    numbers, and no loss of half the digits when a covariance is singular.
    """
    dimension = len(first.mean)
    fewest = min(first.count, second.count)
    if fewest < dimension:
        warnings.warn(
            f"Frechet distance from {fewest} samples in {dimension} dimensions: a singular covariance and "
            "a distance biased upwards; compare only equal counts, or take more samples",
            FedloomWarning,
            stacklevel=2,
        )
    shift = (first.mean - second.mean).square().sum()
    overlap = torch.linalg.svdvals(first.root.T @ second.root).sum()
    spread = first.covariance.trace() + second.covariance.trace() - 2.0 * overlap
    return max(0.0, float(shift + spread))


def frechet(evaluation: Evaluation) -> Values:
    """The Frechet distance of samples, and of reconstructions where there is an encoder, to held-out records."""
    real, name = evaluation.real, evaluation.backbone
    found = {
        metric_key("frechet", name, len(features), group): frechet_distance(real.moments[group], Moments.of(features))
        for group, features in evaluation.features.items()
    }
    rebuilt = [real.extractor.features(vae.reconstructions) for vae in evaluation.autoencoders]
    for vae, features in zip(evaluation.autoencoders, rebuilt, strict=True):
        reference = real.moments[vae.group] if vae.group else Moments.of(_held_out_features(evaluation, vae))
        key = metric_key("frechet-reconstruction", name, len(features), vae.group, vae.silo)
        found[key] = frechet_distance(reference, Moments.of(features))
    if rebuilt and evaluation.autoencoders[0].group:
        everybody = torch.cat(rebuilt)
        key = metric_key("frechet-reconstruction", name, len(everybody))
        found[key] = frechet_distance(real.moments[None], Moments.of(everybody))
    return found


def _held_out_features(evaluation: Evaluation, vae: Autoencoder) -> Tensor:
    """The real features that stand beside a silo's reconstructions, group after group as there."""
    groups = torch.unique(vae.held_out.group).tolist()
    return torch.cat([evaluation.real.features[evaluation.groups[group]] for group in groups])


METRIC = Metric(
    "frechet",
    frechet,
    (
        Reading("frechet/*", "Frechet distance", better="lower", fewest=FEW),
        Reading("frechet-reconstruction/*", "Frechet distance of reconstructions", better="lower", counts="records"),
    ),
    needs=(SAMPLES, FEATURES),
)
