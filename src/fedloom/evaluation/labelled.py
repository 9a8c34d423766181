"""Metrics of labelled vectors: what classifiers learn from samples, and how samples are spread beside held-out ones."""

from __future__ import annotations

from statistics import mean

import torch
from torch import Tensor

from fedloom.evaluation.classification import confusion, fit_head, score
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.keys import metric_key
from fedloom.models.gaussian import DiagonalGaussian
from fedloom.models.labelled import ConditionalVAE
from fedloom.streams import Streams

DIRECTIONS = 256
NO_LABELS = "the method's first pathway is not told which class to generate"


def synthetic_utility(evaluation: Evaluation) -> dict[str, float]:
    """A classifier learns from samples and is tested on all held-out records."""
    if not _labelled(evaluation):
        return evaluation.skip("utility", NO_LABELS)
    test, classes = evaluation.real.federation.test, len(evaluation.real.federation.classes)
    if bool((test.y < 0).any()):
        return evaluation.skip("utility", "some held-out records have no label")
    x = torch.cat([samples.flatten(1) for samples in evaluation.samples.values()]).cpu()
    head = fit_head(x, evaluation.labels.repeat(len(evaluation.groups)), classes)
    predicted = head.probabilities(test.values.flatten(1)).argmax(dim=1)
    found = score(confusion(test.y, predicted, classes, classes), torch.arange(classes))
    names = {
        "accuracy": found.accuracy,
        "balanced-accuracy": found.balanced_accuracy,
        "macro-f1": found.macro_f1,
    }
    return {metric_key("utility", f"synthetic-{name}", len(x)): value for name, value in names.items()}


def sliced_distance(evaluation: Evaluation) -> dict[str, float]:
    """The sliced 2-Wasserstein distance of samples to held-out records, as many of them."""
    found = {}
    for group, samples in evaluation.samples.items():
        real = evaluation.real.held_out[group].values.flatten(1)
        fake = samples[: len(real)].flatten(1).cpu()
        key = metric_key("sliced-wasserstein", f"directions-{DIRECTIONS}", len(fake), group)
        found[key] = sliced_wasserstein(real[: len(fake)], fake)
    return found


def sliced_wasserstein(one: Tensor, other: Tensor) -> float:
    """Root mean square, over public random directions, of the distance along one; both hold as many vectors."""
    drawn = Streams(0).normal("sliced-wasserstein", DIRECTIONS, one.shape[1]).to(torch.float64)
    directions = drawn / drawn.norm(dim=1, keepdim=True)
    along = [(rows.to(torch.float64) @ directions.T).sort(dim=0).values for rows in (one, other)]
    return float((along[0] - along[1]).square().mean().sqrt())


def class_variance(evaluation: Evaluation) -> dict[str, float]:
    """The variance of a class's samples over that of its held-out records: mean, least and most over classes."""
    if not _labelled(evaluation):
        return evaluation.skip("class-variance", NO_LABELS)
    found = {}
    for index, group in enumerate(evaluation.groups):
        test, fake = evaluation.real.federation.test.of_group(index), evaluation.samples[group].flatten(1).cpu()
        ratios = []
        for label in range(len(evaluation.real.federation.classes)):
            real, made = test.values[test.y == label].flatten(1), fake[evaluation.labels == label]
            if len(real) > 1 and len(made) > 1 and (spread := _variance(real)) > 0:
                ratios.append(_variance(made) / spread)
        for name, of in (("mean", mean), ("least", min), ("most", max)):
            if ratios:
                found[metric_key("class-variance", name, len(fake), group)] = of(ratios)
    return found


def _variance(rows: Tensor) -> float:
    """Summed over dimensions."""
    return rows.to(torch.float64).var(dim=0).sum().item()


@torch.no_grad()
def posterior(evaluation: Evaluation) -> dict[str, float]:
    """KL(q(z|x,y) || p(z|y)) in nats on held-out records: near 0 the latents say nothing of a record."""
    found, test = {}, evaluation.real.federation.test
    for silo in evaluation.real.federation.silos:
        model = evaluation.silo_model(silo)
        if isinstance(model, ConditionalVAE) and not bool((test.y < 0).any()):
            x, y = test.values.to(evaluation.real.device), test.y.to(evaluation.real.device)
            nats = divergence(model.encode(x, y), model.prior(y))
            found[metric_key("kl", "nats", len(test), silo=silo.name)] = nats.mean().item()
    if not found:
        return evaluation.skip("posterior", "it needs a conditional VAE whose encoder is known")
    return {metric_key("kl", "nats", len(test)): mean(found.values())} | found


def divergence(one: DiagonalGaussian, other: DiagonalGaussian) -> Tensor:
    """KL(one || other) in nats, summed over latents."""
    gap = one.log_variance - other.log_variance
    distance = (one.mean - other.mean).square() * torch.exp(-other.log_variance)
    return 0.5 * (gap.exp() + distance - 1 - gap).to(torch.float64).sum(dim=1)


def _labelled(evaluation: Evaluation) -> bool:
    return next(iter(evaluation.generator.method.pathways.values())).labelled
