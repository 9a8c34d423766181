"""How steep the released decoders are: certified for all latents, and measured at some."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.evaluation.attacks import Target, targets_of
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import Metric, Reading, Values
from fedloom.models.networks import Routed
from fedloom.models.vae import VAE
from fedloom.privacy.lipschitz import certified_constant, sampled_constant
from fedloom.runs.metrics import metric_key

POINTS = 256  # latents of each group at which the stretch is measured


def lipschitz(evaluation: Evaluation) -> Values:
    """The Lipschitz constant of each released decoder's mean image: a bound that holds everywhere, and what was met."""
    found = {}
    for target in targets_of(evaluation):
        kind, _, name = target.name.partition("=")
        if isinstance(target.model, VAE) and kind in ("group", "silo"):
            owner = {kind: name}
            found[metric_key("lipschitz", "certified", 1, **owner)] = _certified(target.model)
            points = min(POINTS, evaluation.config.samples)
            key = metric_key("lipschitz", "sampled-max", points * len(target.groups), **owner)
            found[key] = max(_met(target, target.model, group, points) for group in target.groups)
    return found or evaluation.skip("lipschitz", "it needs a decoder at the server, and there is none")


def _certified(model: VAE) -> float:
    """The bound that the layers' norms certify; that of the steepest branch, if there are several."""
    decoder = model.decoder
    branches = list(decoder.branches.values()) if isinstance(decoder, Routed) else [decoder]
    return max(map(certified_constant, branches)) * model.likelihood.steepness


def _met(target: Target, model: VAE, group: int, points: int) -> float:
    """The largest stretch at latents from a group's prior."""
    index = torch.full((points,), group, device=target.device)
    means = model.prior_mean(index)
    noise = target.streams.normal("lipschitz", points, means.shape[1], silo=group, device=target.device)

    def mean_image(z: Tensor) -> Tensor:
        return model.likelihood.mean(model.decode(z, index[: len(z)]))

    return sampled_constant(mean_image, means + noise)


METRIC = Metric(
    "lipschitz",
    lipschitz,
    (
        Reading("lipschitz/certified", "Steepest that the decoder can be", counts="decoders", of_records=False),
        Reading("lipschitz/sampled-max", "Steepest that the decoder was met", counts="latents", of_records=False),
    ),
)
