"""Do secret priors protect a group? FissionVAE claims so from pictures; here are numbers, and an attack.

The claim: whoever does not know a group's prior mean cannot generate its images. The prior-swap experiment asks what
happens with another group's mean. The attack asks whether the mean is secret at all: the shared encoder maps a group's
images near it, so a handful of images of that kind gives it away. Whatever the outcome, there is no DP guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.evaluation.domain import domain_hit_rate
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import FEW, Metric, Need, Reading, Values
from fedloom.models.vae import VAE
from fedloom.runs.metrics import metric_key
from fedloom.streams import Streams

HANDFUL = 5
ATTEMPTS = 100


@dataclass(frozen=True)
class PriorAttack:
    """How well a group's prior mean was estimated."""

    identified: float  # share of attempts whose estimate is nearest to the right group's mean
    relative_error: float  # mean distance to the true mean, over the mean distance between the groups' means


@torch.no_grad()
def attack_prior(model: VAE, images: Tensor, group: int, streams: Streams) -> PriorAttack:
    """Average the encoder's means over a handful of images of the group, many times over."""
    means = model.prior_means
    codes = model.encode(images, torch.full((len(images),), group, device=images.device)).mean
    picks = [streams.permutation("prior-attack", len(codes), silo=group, step=i)[:HANDFUL] for i in range(ATTEMPTS)]
    estimates = torch.stack([codes[pick].mean(dim=0) for pick in picks])
    distances = torch.cdist(estimates, means)
    apart = torch.pdist(means).mean()
    return PriorAttack(
        identified=(distances.argmin(dim=1) == group).double().mean().item(),
        relative_error=(distances[:, group].mean() / apart).item(),
    )


def secret_priors(evaluation: Evaluation) -> Values:
    """Whether another group's prior still gives a group's images, and whether a handful of images reveal the prior."""
    return _prior_swaps(evaluation) | _prior_attacks(evaluation)


def _prior_swaps(evaluation: Evaluation) -> Values:
    found, count = {}, evaluation.config.samples
    generator = evaluation.generator
    ways = [name for name in generator.pathways if generator.method.pathways[name].uses_prior]
    for index, group in enumerate(evaluation.groups):
        for pathway in ways:
            for other in evaluation.groups:
                if other != group:
                    images = evaluation.sample(group, pathway, prior_of=other)
                    hits = domain_hit_rate(evaluation.real.domain_classifier.probabilities(images), index)
                    found[metric_key("domain-hit", f"domain-cnn-{pathway}-prior-of-{other}", count, group)] = hits
    return found


def _prior_attacks(evaluation: Evaluation) -> Values:
    found, variant = {}, f"encoder-{HANDFUL}-images"
    for index, vae in enumerate(evaluation.autoencoders):
        attack = attack_prior(vae.model, vae.inputs(vae.held_out)[0], index, evaluation.streams)
        found[metric_key("prior-attack-identified", variant, ATTEMPTS, vae.group)] = attack.identified
        found[metric_key("prior-attack-error", variant, ATTEMPTS, vae.group)] = attack.relative_error
    return found


def _differ(evaluation: Evaluation) -> bool:
    means = evaluation.autoencoders[0].model.prior_means
    return not bool((means == means[0]).all())


ENCODER = Need(
    lambda evaluation: bool(evaluation.autoencoders) and not evaluation.autoencoders[0].silo,
    "the server of this run holds no encoder",
)
PRIORS = Need(_differ, "all groups have the same prior, so there is none to keep secret")
METRIC = Metric(
    "secret-priors",
    secret_priors,
    (
        Reading("domain-hit/*-prior-of-*", "Samples from another group's prior in their own group", fewest=FEW),
        Reading("prior-attack-identified/*", "Priors that a few images give away", counts="attempts"),
        Reading("prior-attack-error/*", "Error of priors guessed from a few images", counts="attempts"),
    ),
    needs=(ENCODER, PRIORS),
)
